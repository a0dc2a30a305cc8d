// Gated activations for x86, in the namespace that FIRSTLIGHT_OPS_SET names.
#pragma once

#include "ops.h"
#include "vector_x86.h"

namespace firstlight::FIRSTLIGHT_OPS_SET {
namespace {

template <GatedKind KIND>
inline Floats gate_all(Floats x) {
  const Floats one = all(1.0f);
  if constexpr (KIND == GatedKind::kSilu) {
    return div(x, add(one, exp_all(sub(zeros(), x))));
  } else {
    const Floats cubic = mul(mul(all(0.044715f), x), x);
    const Floats inner = mul(all(0.797884560802865f), fmadd(cubic, x, x));
    return mul(mul(all(0.5f), x), add(one, tanh_all(inner)));
  }
}

template <GatedKind KIND>
void gated_loop(const float* gate, const float* up, int n, float* out) {
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) store(out + i, mul(gate_all<KIND>(load(gate + i)), load(up + i)));
  if (i < n) scalar::gated(KIND, gate + i, up + i, n - i, out + i);
}

}  // namespace

void gated(GatedKind kind, const float* gate, const float* up, int n, float* out) {
  switch (kind) {
    case GatedKind::kSilu:
      return gated_loop<GatedKind::kSilu>(gate, up, n, out);
    case GatedKind::kGeluTanh:
      return gated_loop<GatedKind::kGeluTanh>(gate, up, n, out);
    default:
      return scalar::gated(kind, gate, up, n, out);
  }
}

}  // namespace firstlight::FIRSTLIGHT_OPS_SET
