// Element-wise and row kernels. Every kernel set does the same operations in the same order, so results are equal to
// the bit.
//
// Sums over a row run in 8 lanes (lane i takes elements i, i + 8, ...; the tail goes to the lanes in order), each lane
// by fma, then ((0+4)+(2+6)) + ((1+5)+(3+7)). exp is exp_f32 of math_scalar.h: a degree-6 polynomial after reduction by
// ln 2, 0 below -87.3, within 2 ulp elsewhere.
#pragma once

#include <cstddef>
#include <cstdint>

#include "weight.h"

namespace firstlight {

enum class GatedKind : int { kSilu = 0, kGeluTanh = 1, kGelu = 2 };

namespace scalar {
// out[i] = x[i] * (1 / sqrt(mean(x^2) + eps)) * weight[i]; out may be x.
void rms_norm(const float* x, const float* weight, float eps, int n, float* out);
// out[i] = act(gate[i]) * up[i]; out may be gate or up.
void gated(GatedKind kind, const float* gate, const float* up, int n, float* out);
// Rotates num_heads heads of head_dim floats; cos and sin are [rotary_dim / 2].
void rope(float* x, int num_heads, int head_dim, int rotary_dim, bool interleaved, const float* cos, const float* sin);
// x[i] = cap * tanh(x[i] / cap)
void soft_cap(float* x, float cap, int n);
// out = x + y
void add(const float* x, const float* y, int n, float* out);
// out[i] = x[i] * s
void scale(const float* x, float s, int n, float* out);
// One row of a packed weight as floats: scale * code + min with one fma.
void dequantise_row(const Weight& w, int row, float* out);
}  // namespace scalar

namespace avx2 {
void rms_norm(const float* x, const float* weight, float eps, int n, float* out);
void gated(GatedKind kind, const float* gate, const float* up, int n, float* out);
void rope(float* x, int num_heads, int head_dim, int rotary_dim, bool interleaved, const float* cos, const float* sin);
void soft_cap(float* x, float cap, int n);
}  // namespace avx2
namespace avx512 {
void gated(GatedKind kind, const float* gate, const float* up, int n, float* out);
}  // namespace avx512

}  // namespace firstlight
