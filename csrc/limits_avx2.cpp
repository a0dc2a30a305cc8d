// AVX2 loops at the machine's limits. Operands are kept opaque to the compiler, which could otherwise compute them
// once.
#include <immintrin.h>

#include "limits.h"

namespace firstlight::limits::avx2 {

uint64_t read(const uint8_t* data, size_t size) {
  __m256i a = _mm256_setzero_si256(), b = a, c = a, d = a;
  for (size_t i = 0; i < size; i += 128) {
    const __m256i* p = reinterpret_cast<const __m256i*>(data + i);
    _mm_prefetch(reinterpret_cast<const char*>(data + i + 2048), _MM_HINT_T0);
    _mm_prefetch(reinterpret_cast<const char*>(data + i + 2112), _MM_HINT_T0);
    a = _mm256_xor_si256(a, _mm256_load_si256(p));
    b = _mm256_xor_si256(b, _mm256_load_si256(p + 1));
    c = _mm256_xor_si256(c, _mm256_load_si256(p + 2));
    d = _mm256_xor_si256(d, _mm256_load_si256(p + 3));
  }
  const __m256i all = _mm256_xor_si256(_mm256_xor_si256(a, b), _mm256_xor_si256(c, d));
  alignas(32) uint64_t out[4];
  _mm256_store_si256(reinterpret_cast<__m256i*>(out), all);
  return out[0] ^ out[1] ^ out[2] ^ out[3];
}

int64_t macs(const uint8_t* operands, int64_t rounds) {
  const __m256i* codes = reinterpret_cast<const __m256i*>(operands);
  const __m256i* values = codes + 8;
  const __m256i ones = _mm256_set1_epi16(1);
  __m256i sums[6];
  for (int t = 0; t < 6; ++t) sums[t] = _mm256_setzero_si256();
  for (int64_t round = 0; round < rounds; ++round) {
    __m256i c[6];
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) {
      __m256i v = _mm256_load_si256(codes + j);
      asm volatile("" : "+x"(v));
#pragma GCC unroll 6
      for (int t = 0; t < 6; ++t) {
        const __m256i m = _mm256_maddubs_epi16(v, _mm256_load_si256(values + t));
        c[t] = j == 0 ? m : _mm256_add_epi16(c[t], m);
        asm volatile("" : "+x"(c[t]));
      }
    }
#pragma GCC unroll 6
    for (int t = 0; t < 6; ++t) sums[t] = _mm256_add_epi32(sums[t], _mm256_madd_epi16(c[t], ones));
  }
  __m256i all = sums[0];
  for (int t = 1; t < 6; ++t) all = _mm256_xor_si256(all, sums[t]);
  alignas(32) int64_t out[4];
  _mm256_store_si256(reinterpret_cast<__m256i*>(out), all);
  return out[0] ^ out[1] ^ out[2] ^ out[3];
}

}  // namespace firstlight::limits::avx2
