// AVX2 row kernels; what is not here has only the scalar form.
#define FIRSTLIGHT_OPS_SET avx2
#include "gated_x86.h"

namespace firstlight::avx2 {

void rms_norm(const float* x, const float* weight, float eps, int n, float* out) {
  __m256 sum = _mm256_setzero_ps();
  int i = 0;
  for (; i + 8 <= n; i += 8) {
    const __m256 v = _mm256_loadu_ps(x + i);
    sum = _mm256_fmadd_ps(v, v, sum);
  }
  alignas(32) float lanes[8];
  _mm256_store_ps(lanes, sum);
  for (; i < n; ++i) lanes[i % 8] = __builtin_fmaf(x[i], x[i], lanes[i % 8]);
  const float inv = 1.0f / __builtin_sqrtf(scalar::lane_sum(lanes) / static_cast<float>(n) + eps);
  const __m256 inv8 = _mm256_set1_ps(inv);
  for (i = 0; i + 8 <= n; i += 8) {
    _mm256_storeu_ps(out + i, _mm256_mul_ps(_mm256_mul_ps(_mm256_loadu_ps(x + i), inv8), _mm256_loadu_ps(weight + i)));
  }
  for (; i < n; ++i) out[i] = x[i] * inv * weight[i];
}

void rope(float* x, int num_heads, int head_dim, int rotary_dim, bool interleaved, const float* cos, const float* sin) {
  const int half = rotary_dim / 2;
  if (half % 8 != 0) return scalar::rope(x, num_heads, head_dim, rotary_dim, interleaved, cos, sin);
  for (int h = 0; h < num_heads; ++h, x += head_dim) {
    for (int i = 0; i < half; i += 8) {
      const __m256 c = _mm256_loadu_ps(cos + i), s = _mm256_loadu_ps(sin + i);
      if (!interleaved) {
        const __m256 a = _mm256_loadu_ps(x + i), b = _mm256_loadu_ps(x + half + i);
        _mm256_storeu_ps(x + i, _mm256_fmsub_ps(a, c, _mm256_mul_ps(b, s)));
        _mm256_storeu_ps(x + half + i, _mm256_fmadd_ps(b, c, _mm256_mul_ps(a, s)));
        continue;
      }
      const __m256 lo = _mm256_loadu_ps(x + 2 * i), hi = _mm256_loadu_ps(x + 2 * i + 8);
      // Within 128-bit halves: a = even elements, b = odd ones, in the order 0 2 8 10 | 4 6 12 14; cos and sin follow
      // it.
      const __m256 a = _mm256_shuffle_ps(lo, hi, 0x88), b = _mm256_shuffle_ps(lo, hi, 0xdd);
      const __m256i order = _mm256_setr_epi32(0, 1, 4, 5, 2, 3, 6, 7);
      const __m256 c2 = _mm256_permutevar8x32_ps(c, order), s2 = _mm256_permutevar8x32_ps(s, order);
      const __m256 na = _mm256_fmsub_ps(a, c2, _mm256_mul_ps(b, s2));
      const __m256 nb = _mm256_fmadd_ps(b, c2, _mm256_mul_ps(a, s2));
      _mm256_storeu_ps(x + 2 * i, _mm256_unpacklo_ps(na, nb));
      _mm256_storeu_ps(x + 2 * i + 8, _mm256_unpackhi_ps(na, nb));
    }
  }
}

void soft_cap(float* x, float cap, int n) {
  const __m256 c = _mm256_set1_ps(cap);
  int i = 0;
  for (; i + 8 <= n; i += 8) {
    _mm256_storeu_ps(x + i, _mm256_mul_ps(c, tanh_all(_mm256_div_ps(_mm256_loadu_ps(x + i), c))));
  }
  if (i < n) scalar::soft_cap(x + i, cap, n - i);
}

}  // namespace firstlight::avx2
