// Vector maths for AVX2 files only: the same operations as math_scalar.h, eight at a time.
#pragma once

#include <immintrin.h>

#include "math_scalar.h"

namespace firstlight::avx2 {

inline __m256 exp8(__m256 x) {
  const __m256 valid = _mm256_cmp_ps(x, _mm256_set1_ps(scalar::kExpLowest), _CMP_GE_OQ);
  x = _mm256_min_ps(x, _mm256_set1_ps(scalar::kExpHighest));
  const __m256 n =
      _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(scalar::kLog2e)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(scalar::kLn2Hi), x);
  r = _mm256_fnmadd_ps(n, _mm256_set1_ps(scalar::kLn2Lo), r);
  __m256 p = _mm256_set1_ps(scalar::kExpPoly[6]);
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(scalar::kExpPoly[5]));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(scalar::kExpPoly[4]));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(scalar::kExpPoly[3]));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(scalar::kExpPoly[2]));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(scalar::kExpPoly[1]));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(scalar::kExpPoly[0]));
  const __m256i e = _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23);
  p = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), e));
  return _mm256_and_ps(p, valid);
}

inline __m256 tanh8(__m256 x) {
  const __m256 one = _mm256_set1_ps(1.0f);
  return _mm256_sub_ps(one, _mm256_div_ps(_mm256_set1_ps(2.0f), _mm256_add_ps(exp8(_mm256_add_ps(x, x)), one)));
}

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

}  // namespace firstlight::avx2
