// AVX2 matrix products. See gemm.h for the order of operations, which is the same as in gemm_scalar.cpp.
#ifndef FIRSTLIGHT_GEMM_SET
#define FIRSTLIGHT_GEMM_SET avx2
#endif

#include "gemm_byte.h"
#include "gemm_float.h"
#include "gemm_nibble.h"
#ifdef FIRSTLIGHT_VNNI
#include "gemm_wide.h"
#endif

namespace firstlight::FIRSTLIGHT_GEMM_SET {
namespace {

template <bool F32>
void nibble(const Weight& w, const Activations& a, const Output& o, int rb0, int rb1, uint8_t* scratch) {
#ifdef FIRSTLIGHT_VNNI
  if (a.num_rows >= kUnpackRows) rb0 = nibble_gemm_wide<F32>(w, a, o, rb0, rb1, scratch);
#endif
  nibble_gemm<F32>(w, a, o, rb0, rb1, scratch);
}

template <int HALVES, bool MIN, bool F32>
void byte(const Weight& w, const Activations& a, const Output& o, int rb0, int rb1, uint8_t* scratch) {
#ifdef FIRSTLIGHT_VNNI
  if (a.num_rows >= kWidenRows) rb0 = byte_gemm_wide<HALVES, MIN, F32>(w, a, o, rb0, rb1, scratch);
#endif
  byte_gemm<HALVES, MIN, F32>(w, a, o, rb0, rb1, scratch);
}

template <int HALVES>
void byte_of_group(const Weight& w, const Activations& a, const Output& o, int rb0, int rb1, uint8_t* scratch) {
  if (w.has_min) {
    return w.scale_f32 ? byte<HALVES, true, true>(w, a, o, rb0, rb1, scratch)
                       : byte<HALVES, true, false>(w, a, o, rb0, rb1, scratch);
  }
  return w.scale_f32 ? byte<HALVES, false, true>(w, a, o, rb0, rb1, scratch)
                     : byte<HALVES, false, false>(w, a, o, rb0, rb1, scratch);
}

}  // namespace

void gemm(const Weight& w, const Activations& a, const float* bias, bool accumulate, float* y, size_t ldy, int rb0,
          int rb1, uint8_t* scratch) {
  const Output o{bias, accumulate, y, ldy, w.rows};
  switch (w.kind) {
    case LayoutKind::kNibble:
      return w.scale_f32 ? nibble<true>(w, a, o, rb0, rb1, scratch) : nibble<false>(w, a, o, rb0, rb1, scratch);
    case LayoutKind::kByte:
      return w.group == 32 ? byte_of_group<1>(w, a, o, rb0, rb1, scratch)
                           : byte_of_group<2>(w, a, o, rb0, rb1, scratch);
    case LayoutKind::kHalf:
      return float_gemm<LayoutKind::kHalf>(w, a, o, rb0, rb1);
    case LayoutKind::kBf16:
      return float_gemm<LayoutKind::kBf16>(w, a, o, rb0, rb1);
    case LayoutKind::kFloat:
      return float_gemm<LayoutKind::kFloat>(w, a, o, rb0, rb1);
  }
}

}  // namespace firstlight::FIRSTLIGHT_GEMM_SET
