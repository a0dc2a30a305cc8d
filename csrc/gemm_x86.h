// What the x86 matrix products share: loads, dot products, stores. Compiled once per kernel set, in the namespace that
// FIRSTLIGHT_GEMM_SET names: gemm_vnni.cpp with the dot-product instructions. Integer sums are exact either way, so all
// sets give the same bits.
#pragma once

#include <immintrin.h>

#include <cstring>

#include "gemm.h"

namespace firstlight::FIRSTLIGHT_GEMM_SET {
namespace {

constexpr size_t kPrefetch = 1536;  // bytes ahead on the weight stream in the memory-bound loops

template <bool F32>
inline __m256 load_scales(const uint8_t* p) {
  if constexpr (F32) {
    return _mm256_loadu_ps(reinterpret_cast<const float*>(p));
  } else {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
}

template <size_t BYTES>
inline void prefetch_record(const uint8_t* p) {
  for (size_t i = 0; i < BYTES; i += 64) _mm_prefetch(reinterpret_cast<const char*>(p + kPrefetch + i), _MM_HINT_T0);
}

// Keeps the compiler from rearranging a chain of integer sums, which costs it more registers than there are.
#ifdef FIRSTLIGHT_VNNI
inline void pin(__m256i& v) { asm("" : "+v"(v)); }
#else
inline void pin(__m256i& v) { asm("" : "+x"(v)); }
#endif

// Sums of codes (0..15) times int8 values: 16 bits hold those of a whole group, VNNI sums fours in 32 bits at once.
inline __m256i dot_codes(__m256i sum, __m256i codes, __m256i values) {
#ifdef FIRSTLIGHT_VNNI
  return _mm256_dpbusd_epi32(sum, codes, values);
#else
  return _mm256_add_epi16(sum, _mm256_maddubs_epi16(codes, values));
#endif
}
inline __m256i first_dot_codes(__m256i codes, __m256i values) {
#ifdef FIRSTLIGHT_VNNI
  return _mm256_dpbusd_epi32(_mm256_setzero_si256(), codes, values);
#else
  return _mm256_maddubs_epi16(codes, values);
#endif
}
inline __m256i add_dots(__m256i a, __m256i b) {
#ifdef FIRSTLIGHT_VNNI
  return _mm256_add_epi32(a, b);
#else
  return _mm256_add_epi16(a, b);
#endif
}
// The eight sums of a group as float.
inline __m256 dots_as_float(__m256i sums) {
#ifdef FIRSTLIGHT_VNNI
  return _mm256_cvtepi32_ps(sums);
#else
  return _mm256_cvtepi32_ps(_mm256_madd_epi16(sums, _mm256_set1_epi16(1)));
#endif
}
// Sums of 16-bit pairs.
inline __m256i dot_words(__m256i sum, __m256i a, __m256i b) {
#ifdef FIRSTLIGHT_VNNI
  return _mm256_dpwssd_epi32(sum, a, b);
#else
  return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b));
#endif
}

// Memory to ask for, a few lines at a time.
struct AheadOf {
  const uint8_t* next;
  const uint8_t* end;
  int lines;  // per 32 inputs

  void ask() {
    for (int i = 0; i < lines && next < end; ++i, next += 64)
      _mm_prefetch(reinterpret_cast<const char*>(next), _MM_HINT_T1);
  }
};
// Spreads the row blocks that follow over the tiles that use these. They may lie past the chunk or past the weight,
// where asking is harmless.
inline AheadOf ahead_of(const uint8_t* row_blocks, size_t bytes, int groups, int tiles) {
  const int lines = static_cast<int>(bytes) / 64;
  return {row_blocks + bytes, row_blocks + 2 * bytes, lines / (groups * tiles) + 1};
}

inline void store256(void* p, __m256i v) { _mm256_store_si256(static_cast<__m256i*>(p), v); }
inline __m256i load256(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline __m256i bcast32(const void* p) { return _mm256_castps_si256(_mm256_broadcast_ss(static_cast<const float*>(p))); }

// Writes 8 outputs of one activation row, or fewer at the matrix's ragged end.
inline void store_outputs(__m256 acc, const float* bias, bool accumulate, float* y, int row, int rows) {
  const int left = rows - row;
  if (left >= 8) {
    if (bias) acc = _mm256_add_ps(acc, _mm256_loadu_ps(bias + row));
    if (accumulate) acc = _mm256_add_ps(_mm256_loadu_ps(y + row), acc);
    _mm256_storeu_ps(y + row, acc);
    return;
  }
  alignas(32) float out[8];
  _mm256_store_ps(out, acc);
  for (int r = 0; r < left; ++r) {
    float v = out[r];
    if (bias) v += bias[row + r];
    if (accumulate) v = y[row + r] + v;
    y[row + r] = v;
  }
}

struct Output {
  const float* bias;
  bool accumulate;
  float* y;
  size_t ldy;
  int rows;
};

template <int T>
inline void store_tile(const __m256* acc, const Output& o, int first_row, int rb) {
#pragma GCC unroll 8
  for (int t = 0; t < T; ++t) {
    store_outputs(acc[t], o.bias, o.accumulate, o.y + static_cast<size_t>(first_row + t) * o.ldy, rb * 8, o.rows);
  }
}

// Calls f.template operator()<T>() with T = rows, 1..kTile.
template <typename F>
inline void with_tile(int rows, const F& f) {
  switch (rows) {
    case 1:
      return f.template operator()<1>();
    case 2:
      return f.template operator()<2>();
    case 3:
      return f.template operator()<3>();
    case 4:
      return f.template operator()<4>();
    case 5:
      return f.template operator()<5>();
    default:
      return f.template operator()<6>();
  }
}

}  // namespace
}  // namespace firstlight::FIRSTLIGHT_GEMM_SET
