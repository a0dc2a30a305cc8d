// Products with byte weights, 8 outputs at a time: int8 codes times int16 activations, as gemm_nibble.h otherwise.
#pragma once

#include "gemm_x86.h"

namespace firstlight::FIRSTLIGHT_GEMM_SET {
namespace {

constexpr int kWidenRows = 4;          // from so many rows on widening into scratch pays
constexpr size_t kByteUnpacked = 640;  // bytes of scratch per 32 inputs

// How the scales of one byte record lie: HALVES groups inside 32 inputs, mins or not, float32 or float16.
template <int HALVES, bool MIN, bool F32>
struct ByteRecord {
  static constexpr size_t kScale = F32 ? 32 : 16;
  static constexpr size_t kCodes = kScale * HALVES * (MIN ? 2 : 1);
  static constexpr size_t kBytes = kCodes + 256;
};

// T rows of activations times one row block; codes come straight from the record (CODES16 false) or from scratch,
// widened.
template <int T, int HALVES, bool MIN, bool F32, bool UNPACKED>
void byte_tile(const uint8_t* w, int groups, const int16_t* q, const float* scale, const float* sums, __m256* out) {
  using Record = ByteRecord<HALVES, MIN, F32>;
  constexpr int kUnits = 16 / HALVES;
  __m256 acc[T];
  for (int t = 0; t < T; ++t) acc[t] = _mm256_setzero_ps();
  for (int g = 0; g < groups; ++g, q += T * 32, scale += T, sums += 2 * T) {
    if constexpr (!UNPACKED) prefetch_record<Record::kBytes>(w);
#pragma GCC unroll 2
    for (int h = 0; h < HALVES; ++h) {
      __m256i c[T];
#pragma GCC unroll 16
      for (int i = 0; i < kUnits; ++i) {
        const int u = h * kUnits + i;
        __m256i v;
        if constexpr (UNPACKED) {
          v = load256(w + u * 32);
        } else {
          v = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(w + Record::kCodes + u * 16)));
        }
#pragma GCC unroll 8
        for (int t = 0; t < T; ++t) {
          const __m256i x = bcast32(q + t * 32 + 2 * u);
          c[t] = i == 0 ? _mm256_madd_epi16(v, x) : dot_words(c[t], v, x);
          if constexpr (UNPACKED) pin(c[t]);
        }
      }
      __m256 ws, wm = _mm256_setzero_ps();
      if constexpr (UNPACKED) {
        ws = _mm256_load_ps(reinterpret_cast<const float*>(w + 512 + h * 32));
        if constexpr (MIN) wm = _mm256_load_ps(reinterpret_cast<const float*>(w + 576 + h * 32));
      } else {
        ws = load_scales<F32>(w + h * Record::kScale);
        if constexpr (MIN) wm = load_scales<F32>(w + (HALVES + h) * Record::kScale);
      }
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) {
        acc[t] = _mm256_fmadd_ps(_mm256_mul_ps(ws, _mm256_broadcast_ss(scale + t)), _mm256_cvtepi32_ps(c[t]), acc[t]);
        if constexpr (MIN) {
          __m256 s = _mm256_broadcast_ss(sums + h * T + t);
          if constexpr (HALVES == 1) s = _mm256_add_ps(s, _mm256_broadcast_ss(sums + T + t));
          acc[t] = _mm256_fmadd_ps(wm, s, acc[t]);
        }
      }
    }
    w += UNPACKED ? kByteUnpacked : Record::kBytes;
  }
  for (int t = 0; t < T; ++t) out[t] = acc[t];
}

// Widens one row block. Per 32 inputs: codes [16 units][32 bytes], scales [2][8] float, mins [2][8] float.
template <int HALVES, bool MIN, bool F32>
void byte_unpack(const uint8_t* w, int groups, uint8_t* out) {
  using Record = ByteRecord<HALVES, MIN, F32>;
  for (int g = 0; g < groups; ++g, w += Record::kBytes, out += kByteUnpacked) {
    prefetch_record<Record::kBytes>(w);
    for (int u = 0; u < 16; ++u) {
      store256(out + u * 32,
               _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(w + Record::kCodes + u * 16))));
    }
    for (int h = 0; h < HALVES; ++h) {
      _mm256_store_ps(reinterpret_cast<float*>(out + 512 + h * 32), load_scales<F32>(w + h * Record::kScale));
      if constexpr (MIN) {
        _mm256_store_ps(reinterpret_cast<float*>(out + 576 + h * 32),
                        load_scales<F32>(w + (HALVES + h) * Record::kScale));
      }
    }
  }
}

template <int HALVES, bool MIN, bool F32>
void byte_gemm(const Weight& w, const Activations& a, const Output& o, int rb0, int rb1, uint8_t* scratch) {
  const int groups = w.groups(), tiles = a.num_tiles();
  const size_t stride = w.row_block_bytes();
  for (int rb = rb0; rb < rb1; ++rb) {
    const uint8_t* codes = w.data + static_cast<size_t>(rb) * stride;
    const bool unpacked = a.num_rows >= kWidenRows;
    if (unpacked) byte_unpack<HALVES, MIN, F32>(codes, groups, scratch);
    for (int i = 0; i < tiles; ++i) {
      const int row = a.tile_start(i), rows = a.tile_start(i + 1) - row;
      const int16_t* q = static_cast<const int16_t*>(a.q) + static_cast<size_t>(row) * static_cast<size_t>(a.cols);
      const float* scale = a.scale + static_cast<size_t>(row) * static_cast<size_t>(groups);
      const float* sums = a.sums + static_cast<size_t>(row) * static_cast<size_t>(groups) * 2;
      with_tile(rows, [&]<int T>() {
        __m256 acc[T];
        if (unpacked) {
          byte_tile<T, HALVES, MIN, F32, true>(scratch, groups, q, scale, sums, acc);
        } else {
          byte_tile<T, HALVES, MIN, F32, false>(codes, groups, q, scale, sums, acc);
        }
        store_tile<T>(acc, o, row, rb);
      });
    }
  }
}

}  // namespace
}  // namespace firstlight::FIRSTLIGHT_GEMM_SET
