// Products with float16, bfloat16 and float32 weights.
#pragma once

#include "gemm_x86.h"

namespace firstlight::FIRSTLIGHT_GEMM_SET {
namespace {

template <LayoutKind KIND>
inline __m256 load_row8(const uint8_t* p) {
  if constexpr (KIND == LayoutKind::kFloat) {
    return _mm256_loadu_ps(reinterpret_cast<const float*>(p));
  } else if constexpr (KIND == LayoutKind::kHalf) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  } else {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
  }
}

// R row blocks times T rows of activations: R * T independent chains, each in the order of k.
template <LayoutKind KIND, int R, int T>
void float_tile(const uint8_t* w, size_t row_block_bytes, int cols, const float* x, __m256* out) {
  constexpr size_t kRecord = KIND == LayoutKind::kFloat ? 32 : 16;
  __m256 acc[R * T];
  for (int i = 0; i < R * T; ++i) acc[i] = _mm256_setzero_ps();
  for (int k = 0; k < cols; ++k, w += kRecord, x += T) {
    __m256 v[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) v[r] = load_row8<KIND>(w + static_cast<size_t>(r) * row_block_bytes);
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) {
      const __m256 b = _mm256_broadcast_ss(x + t);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) acc[r * T + t] = _mm256_fmadd_ps(v[r], b, acc[r * T + t]);
    }
  }
  for (int i = 0; i < R * T; ++i) out[i] = acc[i];
}

template <LayoutKind KIND>
void float_gemm(const Weight& w, const Activations& a, const Output& o, int rb0, int rb1) {
  const int tiles = a.num_tiles();
  const size_t stride = w.row_block_bytes();
  for (int rb = rb0; rb < rb1;) {
    const int left = rb1 - rb;
    int step = 1;
    for (int i = 0; i < tiles; ++i) {
      const int row = a.tile_start(i), rows = a.tile_start(i + 1) - row;
      const float* x = static_cast<const float*>(a.q) + static_cast<size_t>(row) * static_cast<size_t>(a.cols);
      const uint8_t* values = w.data + static_cast<size_t>(rb) * stride;
      with_tile(rows, [&]<int T>() {
        constexpr int kWide = T <= 2 ? 4 : 2;
        __m256 acc[kWide * T];
        step = left >= kWide ? kWide : 1;
        if (step == kWide) {
          float_tile<KIND, kWide, T>(values, stride, w.cols, x, acc);
        } else {
          float_tile<KIND, 1, T>(values, stride, w.cols, x, acc);
        }
        for (int r = 0; r < step; ++r) store_tile<T>(acc + r * T, o, row, rb + r);
      });
    }
    rb += step;
  }
}

}  // namespace
}  // namespace firstlight::FIRSTLIGHT_GEMM_SET
