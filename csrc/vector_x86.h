// Vectors of floats for x86: 16 lanes in files compiled for AVX-512, 8 in those for AVX2. Every operation is exact or
// rounds once, and exp and tanh are math_scalar.h's step by step, so the bits do not depend on the width.
//
// All of it has internal linkage: two files compiled for different processors must not share a function.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <utility>

#include "math_scalar.h"

namespace firstlight {
namespace {

#ifdef __AVX512F__
using Floats = __m512;
using Mask = __mmask16;

inline Floats zeros() { return _mm512_setzero_ps(); }
inline Floats all(float x) { return _mm512_set1_ps(x); }
inline Floats load(const float* p) { return _mm512_loadu_ps(p); }
inline Floats load(const uint16_t* half) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(half)));
}
inline void store(float* p, Floats v) { _mm512_storeu_ps(p, v); }
inline Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
inline Floats sub(Floats a, Floats b) { return _mm512_sub_ps(a, b); }
inline Floats mul(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
inline Floats div(Floats a, Floats b) { return _mm512_div_ps(a, b); }
inline Floats fmadd(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
inline Floats fnmadd(Floats a, Floats b, Floats c) { return _mm512_fnmadd_ps(a, b, c); }
inline Floats min(Floats a, Floats b) { return _mm512_min_ps(a, b); }
inline Floats max(Floats a, Floats b) { return _mm512_max_ps(a, b); }
// x * 2^n where the mask says, else 0; the low bits of `shifted` are n.
inline Floats times_power_where(Mask mask, Floats x, Floats shifted) {
  const __m512i power = _mm512_slli_epi32(_mm512_castps_si512(shifted), 23);
  return _mm512_castsi512_ps(_mm512_maskz_add_epi32(mask, _mm512_castps_si512(x), power));
}
inline Mask at_least(Floats x, Floats limit) { return _mm512_cmp_ps_mask(x, limit, _CMP_GE_OQ); }
// Lanes whose index, counted from `at`, lies in [low, high).
inline Mask between(int at, int low, int high) {
  const __m512i step = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i index = _mm512_add_epi32(_mm512_set1_epi32(at), step);
  return _mm512_cmpge_epi32_mask(index, _mm512_set1_epi32(low)) &
         _mm512_cmplt_epi32_mask(index, _mm512_set1_epi32(high));
}
inline Floats select(Mask mask, Floats yes, Floats no) { return _mm512_mask_blend_ps(mask, no, yes); }
inline __m256 low_half(Floats v) { return _mm512_castps512_ps256(v); }
inline __m256 high_half(Floats v) { return _mm512_extractf32x8_ps(v, 1); }
// Sums in eight lanes: lane i takes elements i, i + 8, ... in order.
inline __m256 add_in_eight(__m256 sums, Floats v) {
  return _mm256_add_ps(_mm256_add_ps(sums, low_half(v)), high_half(v));
}
inline __m256 max_in_eight(Floats v) { return _mm256_max_ps(low_half(v), high_half(v)); }
#else
using Floats = __m256;
using Mask = __m256;

inline Floats zeros() { return _mm256_setzero_ps(); }
inline Floats all(float x) { return _mm256_set1_ps(x); }
inline Floats load(const float* p) { return _mm256_loadu_ps(p); }
inline Floats load(const uint16_t* half) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(half)));
}
inline void store(float* p, Floats v) { _mm256_storeu_ps(p, v); }
inline Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
inline Floats sub(Floats a, Floats b) { return _mm256_sub_ps(a, b); }
inline Floats mul(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
inline Floats div(Floats a, Floats b) { return _mm256_div_ps(a, b); }
inline Floats fmadd(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
inline Floats fnmadd(Floats a, Floats b, Floats c) { return _mm256_fnmadd_ps(a, b, c); }
inline Floats min(Floats a, Floats b) { return _mm256_min_ps(a, b); }
inline Floats max(Floats a, Floats b) { return _mm256_max_ps(a, b); }
// x * 2^n where the mask says, else 0; the low bits of `shifted` are n.
inline Floats times_power_where(Mask mask, Floats x, Floats shifted) {
  const __m256i power = _mm256_slli_epi32(_mm256_castps_si256(shifted), 23);
  return _mm256_and_ps(_mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x), power)), mask);
}
inline Mask at_least(Floats x, Floats limit) { return _mm256_cmp_ps(x, limit, _CMP_GE_OQ); }
// Lanes whose index, counted from `at`, lies in [low, high).
inline Mask between(int at, int low, int high) {
  const __m256i index = _mm256_add_epi32(_mm256_set1_epi32(at), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  return _mm256_castsi256_ps(_mm256_andnot_si256(_mm256_cmpgt_epi32(_mm256_set1_epi32(low), index),
                                                 _mm256_cmpgt_epi32(_mm256_set1_epi32(high), index)));
}
inline Floats select(Mask mask, Floats yes, Floats no) { return _mm256_blendv_ps(no, yes, mask); }
// Sums in eight lanes: lane i takes elements i, i + 8, ... in order.
inline __m256 add_in_eight(__m256 sums, Floats v) { return _mm256_add_ps(sums, v); }
inline __m256 max_in_eight(Floats v) { return v; }
#endif

constexpr int kLanes = sizeof(Floats) / sizeof(float);

template <size_t... I, typename F>
__attribute__((always_inline)) inline void repeat_for(std::index_sequence<I...>, const F& f) {
  (f.template operator()<static_cast<int>(I)>(), ...);
}
// Calls f.template operator()<I>() for I from 0 to N - 1: with constant indices an array of vectors stays in registers,
// where a loop that is unrolled late may leave it in memory.
template <int N, typename F>
__attribute__((always_inline)) inline void repeat(const F& f) {
  repeat_for(std::make_index_sequence<N>{}, f);
}

// exp of x <= 88 where `valid`, else 0. Adding 1.5 * 2^23 rounds to a whole number, which then stands in the sum's low
// bits.
inline Floats exp_within(Mask valid, Floats x) {
  const Floats shifted = add(mul(x, all(scalar::kLog2e)), all(12582912.0f));
  const Floats n = sub(shifted, all(12582912.0f));
  Floats r = fnmadd(n, all(scalar::kLn2Hi), x);
  r = fnmadd(n, all(scalar::kLn2Lo), r);
  Floats p = all(scalar::kExpPoly[6]);
#pragma GCC unroll 6
  for (int i = 5; i >= 0; --i) p = fmadd(p, r, all(scalar::kExpPoly[i]));
  return times_power_where(valid, p, shifted);
}
inline Floats exp_all(Floats x) {
  return exp_within(at_least(x, all(scalar::kExpLowest)), min(x, all(scalar::kExpHighest)));
}
inline Floats exp_of_negative(Floats x) { return exp_within(at_least(x, all(scalar::kExpLowest)), x); }

inline Floats tanh_all(Floats x) { return sub(all(1.0f), div(all(2.0f), add(exp_all(add(x, x)), all(1.0f)))); }

// ((0+4)+(2+6)) + ((1+5)+(3+7))
inline float lane_sum8(__m256 v) {
  const __m128 a = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  const __m128 b = _mm_add_ps(a, _mm_movehl_ps(a, a));
  return _mm_cvtss_f32(_mm_add_ss(b, _mm_shuffle_ps(b, b, 1)));
}

inline float lane_max8(__m256 v) {
  const __m128 a = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  const __m128 b = _mm_max_ps(a, _mm_movehl_ps(a, a));
  return _mm_cvtss_f32(_mm_max_ss(b, _mm_shuffle_ps(b, b, 1)));
}

}  // namespace
}  // namespace firstlight
