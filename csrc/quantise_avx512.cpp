// AVX-512 activation quantisation: the same numbers as scalar::quantise.
//
// Three passes over a row that stays in the L1 cache: the largest magnitude of every group, all their divisions at
// once, the values.
#include <immintrin.h>

#include <algorithm>

#include "gemm.h"
#include "vector_x86.h"

namespace firstlight::avx512 {
namespace {

constexpr int kMostGroups = 64;  // of one round of the passes

inline int sum_epi32(__m256i v) {
  __m128i a = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  a = _mm_add_epi32(a, _mm_shuffle_epi32(a, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(a, _mm_shuffle_epi32(a, 0xb1)));
}

// One tile's rows of one form, from the row's own place on.
struct Place {
  uint8_t* q;
  float *scale, *sums;
  size_t size;  // rows of the tile
};

void quantise_int8(__m512i a, __m512i b, float d, const Place& p, size_t g) {
  const __m256i bytes = _mm256_set_m128i(_mm512_cvtsepi32_epi8(b), _mm512_cvtsepi32_epi8(a));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p.q + g * p.size * 32), bytes);
  const __m256i fours = _mm256_dpbusd_epi32(_mm256_setzero_si256(), _mm256_set1_epi8(1), bytes);
  p.sums[g * p.size] = d * static_cast<float>(sum_epi32(fours));
}

void quantise_int16(__m512i a, __m512i b, float d, bool in_planes, const Place& p, size_t g) {
  const __m256i first = _mm512_cvtsepi32_epi16(a), second = _mm512_cvtsepi32_epi16(b);
  const __m512i words = _mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1);
  auto* out = reinterpret_cast<__m256i*>(p.q + g * p.size * 64);
  if (in_planes) {
    _mm256_storeu_si256(out, _mm512_cvtepi16_epi8(words));
    _mm256_storeu_si256(out + 1, _mm512_cvtepi16_epi8(_mm512_srai_epi16(words, 8)));
  } else {
    _mm512_storeu_si512(out, words);
  }
  const __m256i ones = _mm256_set1_epi16(1);
  float* sums = p.sums + 2 * g * p.size;
  sums[0] = d * static_cast<float>(sum_epi32(_mm256_madd_epi16(first, ones)));
  sums[p.size] = d * static_cast<float>(sum_epi32(_mm256_madd_epi16(second, ones)));
}

}  // namespace

void quantise(const float* x, const Activations& a, int row, int begin, int end) {
  if (a.kind == ActKind::kFloat) return scalar::quantise(x, a, row, begin, end);
  const int tile = a.tile_of(row), start = a.tile_start(tile);
  const bool is_int8 = a.kind == ActKind::kInt8;
  const size_t size = static_cast<size_t>(a.tile_start(tile + 1) - start), t = static_cast<size_t>(row - start);
  const size_t last = static_cast<size_t>(end);
  const size_t before = static_cast<size_t>(start) * static_cast<size_t>(a.cols / 32);
  const size_t value = is_int8 ? 1 : 2;
  const Place p{static_cast<uint8_t*>(a.q) + (before + t) * 32 * value, a.scale + before + t,
                a.sums + before * value + t, size};
  const __m512 tops = _mm512_set1_ps(is_int8 ? 127.0f : 32767.0f);
  alignas(64) float max[kMostGroups], d[kMostGroups], id[kMostGroups];
  for (size_t g0 = static_cast<size_t>(begin); g0 < last; g0 += kMostGroups) {
    const size_t count = std::min<size_t>(kMostGroups, last - g0);
    for (size_t g = 0; g < count; ++g) {
      const float* v = x + (g0 + g) * 32;
      // A NaN as the first operand gives the second.
      const __m512 low = _mm512_max_ps(_mm512_abs_ps(_mm512_loadu_ps(v)), _mm512_setzero_ps());
      const __m512 both = _mm512_max_ps(_mm512_abs_ps(_mm512_loadu_ps(v + 16)), low);
      max[g] = lane_max8(_mm256_max_ps(_mm512_castps512_ps256(both), _mm512_extractf32x8_ps(both, 1)));
    }
    for (size_t g = count; g % 16 != 0; ++g) max[g] = 0.0f;
    for (size_t g = 0; g < count; g += 16) {
      const __m512 m = _mm512_load_ps(max + g);
      const __mmask16 is_set = _mm512_cmp_ps_mask(m, _mm512_set1_ps(kSmallestMax), _CMP_GE_OQ);
      _mm512_store_ps(d + g, _mm512_maskz_div_ps(is_set, m, tops));
      _mm512_store_ps(id + g, _mm512_maskz_div_ps(is_set, tops, m));
    }
    for (size_t g = 0; g < count; ++g) {
      const float* v = x + (g0 + g) * 32;
      const __m512 scale = _mm512_set1_ps(id[g]);
      const __m512i low = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(v), scale));
      const __m512i high = _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(v + 16), scale));
      p.scale[(g0 + g) * size] = d[g];
      if (is_int8) {
        quantise_int8(low, high, d[g], p, g0 + g);
      } else {
        quantise_int16(low, high, d[g], a.layout.in_planes, p, g0 + g);
      }
    }
  }
}

}  // namespace firstlight::avx512
