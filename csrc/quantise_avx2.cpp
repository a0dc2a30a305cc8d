// AVX2 activation quantisation: the same numbers as scalar::quantise.
#include <immintrin.h>

#include "gemm.h"
#include "vector_x86.h"

namespace firstlight::avx2 {
namespace {

inline int sum_epi32(__m256i v) {
  __m128i a = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  a = _mm_add_epi32(a, _mm_shuffle_epi32(a, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(a, _mm_shuffle_epi32(a, 0xb1)));
}

}  // namespace

void quantise(const float* x, const Activations& a, int row, int begin, int end) {
  if (a.kind == ActKind::kFloat) return scalar::quantise(x, a, row, begin, end);
  const int tile = a.tile_of(row), start = a.tile_start(tile), size = a.tile_start(tile + 1) - start, t = row - start;
  const int groups = a.cols / 32;
  const size_t base = static_cast<size_t>(start) * static_cast<size_t>(a.cols);
  const bool is_int8 = a.kind == ActKind::kInt8;
  const float top = is_int8 ? 127.0f : 32767.0f;
  const __m256 magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
  x += 32 * begin;
  for (int g = begin; g < end; ++g, x += 32) {
    __m256 v[4];
    __m256 max8 = _mm256_setzero_ps();
    for (int i = 0; i < 4; ++i) {
      v[i] = _mm256_loadu_ps(x + 8 * i);
      max8 = _mm256_max_ps(_mm256_and_ps(v[i], magnitude), max8);  // a NaN leaves max8 as it was
    }
    const float max = lane_max8(max8);
    const bool is_zero = !(max >= kSmallestMax);
    const float d = is_zero ? 0.0f : max / top, id = is_zero ? 0.0f : top / max;
    const __m256 id8 = _mm256_set1_ps(id);
    __m256i q[4];
    for (int i = 0; i < 4; ++i) q[i] = _mm256_cvtps_epi32(_mm256_mul_ps(v[i], id8));
    // packs works inside 128-bit halves; the permutes put the 32 values back in order.
    const __m256i lo = _mm256_permute4x64_epi64(_mm256_packs_epi32(q[0], q[1]), 0xd8);
    const __m256i hi = _mm256_permute4x64_epi64(_mm256_packs_epi32(q[2], q[3]), 0xd8);
    const __m256i ones = _mm256_set1_epi16(1);
    const size_t at = static_cast<size_t>(g * size + t);
    a.scale[static_cast<size_t>(start * groups) + at] = d;
    if (is_int8) {
      const __m256i bytes = _mm256_permute4x64_epi64(_mm256_packs_epi16(lo, hi), 0xd8);
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(static_cast<int8_t*>(a.q) + base + at * 32), bytes);
      const __m256i s = _mm256_madd_epi16(_mm256_add_epi16(_mm256_cvtepi8_epi16(_mm256_castsi256_si128(bytes)),
                                                           _mm256_cvtepi8_epi16(_mm256_extracti128_si256(bytes, 1))),
                                          ones);
      a.sums[static_cast<size_t>(start * groups) + at] = d * static_cast<float>(sum_epi32(s));
    } else {
      auto* out = reinterpret_cast<__m256i*>(static_cast<int16_t*>(a.q) + base + at * 32);
      if (a.layout.in_planes) {
        const __m256i byte = _mm256_set1_epi16(255);
        const __m256i low = _mm256_packus_epi16(_mm256_and_si256(lo, byte), _mm256_and_si256(hi, byte));
        const __m256i high = _mm256_packs_epi16(_mm256_srai_epi16(lo, 8), _mm256_srai_epi16(hi, 8));
        _mm256_storeu_si256(out, _mm256_permute4x64_epi64(low, 0xd8));
        _mm256_storeu_si256(out + 1, _mm256_permute4x64_epi64(high, 0xd8));
      } else {
        _mm256_storeu_si256(out, lo);
        _mm256_storeu_si256(out + 1, hi);
      }
      float* sums = a.sums + static_cast<size_t>(start * groups) * 2 + static_cast<size_t>(g * 2 * size + t);
      sums[0] = d * static_cast<float>(sum_epi32(_mm256_madd_epi16(lo, ones)));
      sums[size] = d * static_cast<float>(sum_epi32(_mm256_madd_epi16(hi, ones)));
    }
  }
}

}  // namespace firstlight::avx2
