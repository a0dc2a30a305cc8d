// Attention on vectors of 8, and KV writes for every vector set.
#define FIRSTLIGHT_ATTENTION_SET avx2
#include "attention_x86.h"

namespace firstlight::avx2 {

void write_kv(const KvView& kv, int block, int slot, const float* k, const float* v) {
  const __m256 high = _mm256_set1_ps(scalar::kHalfMax), low = _mm256_set1_ps(-scalar::kHalfMax);
  for (int h = 0; h < kv.num_kv_heads; ++h) {
    uint16_t* keys = kv.keys(block, h) + slot;
    uint16_t* values = kv.values(block, h) + static_cast<size_t>(slot) * static_cast<size_t>(kv.head_dim);
    for (int d = 0; d < kv.head_dim; d += 8, k += 8, v += 8) {
      // min_ps and max_ps give their second operand for NaN: a NaN becomes kHalfMax, as in scalar::clamp_half.
      const __m256 k8 = _mm256_max_ps(_mm256_min_ps(_mm256_loadu_ps(k), high), low);
      const __m256 v8 = _mm256_max_ps(_mm256_min_ps(_mm256_loadu_ps(v), high), low);
      alignas(16) uint16_t column[8];
      _mm_store_si128(reinterpret_cast<__m128i*>(column), _mm256_cvtps_ph(k8, _MM_FROUND_TO_NEAREST_INT));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(values + d), _mm256_cvtps_ph(v8, _MM_FROUND_TO_NEAREST_INT));
      for (int i = 0; i < 8; ++i) keys[static_cast<size_t>(d + i) * static_cast<size_t>(kv.block_size)] = column[i];
    }
  }
}

}  // namespace firstlight::avx2
