// Products of many rows of activations on 512-bit vectors: 32 outputs (a pack of four row blocks) times six rows.
// Against the loops on 256 bits, half the loads and half the instructions per product, and registers enough that one
// broadcast of activations serves two vectors of codes. While one pack is multiplied the next one is asked for: with
// few rows the two take about as long.
#pragma once

#include "gemm_byte.h"
#include "gemm_nibble.h"

namespace firstlight::FIRSTLIGHT_GEMM_SET {
namespace {

inline void pin(__m512i& v) { asm("" : "+v"(v)); }
inline __m512i load512(const void* p) { return _mm512_load_si512(p); }
inline __m512i bcast32_wide(const void* p) {
  int word;
  std::memcpy(&word, p, 4);
  return _mm512_set1_epi32(word);
}

constexpr int V = 2;          // vectors of 16 outputs
constexpr int kPack = 2 * V;  // row blocks
// Scratch of a pack per 32 inputs: codes, then scales and mins as float.
constexpr size_t kWideNibble = V * (8 + 2) * 64;
constexpr size_t kWideByte = V * (16 + 4) * 64;

// Writes 16 outputs of one activation row, or fewer at the matrix's ragged end.
inline void store_outputs_wide(__m512 acc, const float* bias, bool accumulate, float* y, int row, int rows) {
  if (rows - row < 16) {
    alignas(64) float out[16];
    _mm512_store_ps(out, acc);
    store_outputs(_mm256_load_ps(out), bias, accumulate, y, row, rows);
    if (rows - row > 8) store_outputs(_mm256_load_ps(out + 8), bias, accumulate, y, row + 8, rows);
    return;
  }
  if (bias) acc = _mm512_add_ps(acc, _mm512_loadu_ps(bias + row));
  if (accumulate) acc = _mm512_add_ps(_mm512_loadu_ps(y + row), acc);
  _mm512_storeu_ps(y + row, acc);
}

template <int T>
inline void store_tile_wide(const __m512* acc, const Output& o, int first_row, int rb) {
#pragma GCC unroll 8
  for (int t = 0; t < T; ++t) {
    float* y = o.y + static_cast<size_t>(first_row + t) * o.ldy;
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) {
      store_outputs_wide(acc[t * V + v], o.bias, o.accumulate, y, rb * 8 + 16 * v, o.rows);
    }
  }
}

// ---------------------------------------------------------------- nibble

// Unpacks a pack, its row blocks side by side.
template <bool F32>
void nibble_unpack_wide(const uint8_t* w, size_t row_block_bytes, int groups, uint8_t* out) {
  constexpr size_t kScale = F32 ? 32 : 16;
  constexpr size_t kRecord = 2 * kScale + 128;
  const __m256i low = _mm256_set1_epi8(15);
  for (int g = 0; g < groups; ++g, w += kRecord, out += kWideNibble) {
#pragma GCC unroll 4
    for (int b = 0; b < kPack; ++b) {
      const uint8_t* record = w + static_cast<size_t>(b) * row_block_bytes;
      uint8_t* at = out + b * 32;
      prefetch_record<kRecord>(record);
      for (int j = 0; j < 4; ++j) {
        const __m256i codes = load256(record + 2 * kScale + 32 * j);
        store256(at + j * 64 * V, _mm256_and_si256(codes, low));
        store256(at + (j + 4) * 64 * V, _mm256_and_si256(_mm256_srli_epi16(codes, 4), low));
      }
      _mm256_store_ps(reinterpret_cast<float*>(at + 8 * 64 * V), load_scales<F32>(record));
      _mm256_store_ps(reinterpret_cast<float*>(at + 9 * 64 * V), load_scales<F32>(record + kScale));
    }
  }
}

template <int T>
void nibble_tile_wide(const uint8_t* u, int groups, const int8_t* q, const float* scale, const float* sums,
                      AheadOf& ahead, __m512* out) {
  __m512 acc[T * V];
  for (int i = 0; i < T * V; ++i) acc[i] = _mm512_setzero_ps();
  for (int g = 0; g < groups; ++g, u += kWideNibble, q += T * 32, scale += T, sums += T) {
    ahead.ask();
    __m512i c[T * V];
    for (int i = 0; i < T * V; ++i) c[i] = _mm512_setzero_si512();
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) {
      __m512i codes[V];
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) codes[v] = load512(u + (j * V + v) * 64);
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) {
        const __m512i x = bcast32_wide(q + t * 32 + 4 * j);
#pragma GCC unroll 2
        for (int v = 0; v < V; ++v) {
          c[t * V + v] = _mm512_dpbusd_epi32(c[t * V + v], codes[v], x);
          pin(c[t * V + v]);
        }
      }
    }
    __m512 ws[V], wm[V];
#pragma GCC unroll 2
    for (int v = 0; v < V; ++v) {
      ws[v] = _mm512_load_ps(u + (8 * V + v) * 64);
      wm[v] = _mm512_load_ps(u + (9 * V + v) * 64);
    }
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) {
      const __m512 ad = _mm512_set1_ps(scale[t]), as = _mm512_set1_ps(sums[t]);
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) {
        __m512& sum = acc[t * V + v];
        sum = _mm512_fmadd_ps(_mm512_mul_ps(ws[v], ad), _mm512_cvtepi32_ps(c[t * V + v]), sum);
        sum = _mm512_fmadd_ps(wm[v], as, sum);
      }
    }
  }
  for (int i = 0; i < T * V; ++i) out[i] = acc[i];
}

// ---------------------------------------------------------------- byte

template <int HALVES, bool MIN, bool F32>
void byte_unpack_wide(const uint8_t* w, size_t row_block_bytes, int groups, uint8_t* out) {
  using Record = ByteRecord<HALVES, MIN, F32>;
  for (int g = 0; g < groups; ++g, w += Record::kBytes, out += kWideByte) {
#pragma GCC unroll 4
    for (int b = 0; b < kPack; ++b) {
      const uint8_t* record = w + static_cast<size_t>(b) * row_block_bytes;
      uint8_t* at = out + b * 32;
      prefetch_record<Record::kBytes>(record);
      for (int i = 0; i < 16; ++i) {
        const void* codes = record + Record::kCodes + i * 16;
        store256(at + i * 64 * V, _mm256_cvtepi8_epi16(_mm_loadu_si128(static_cast<const __m128i*>(codes))));
      }
      for (int h = 0; h < HALVES * (MIN ? 2 : 1); ++h) {
        _mm256_store_ps(reinterpret_cast<float*>(at + (16 + h) * 64 * V),
                        load_scales<F32>(record + h * Record::kScale));
      }
    }
  }
}

template <int T, int HALVES, bool MIN>
void byte_tile_wide(const uint8_t* u, int groups, const int16_t* q, const float* scale, const float* sums,
                    AheadOf& ahead, __m512* out) {
  constexpr int kUnits = 16 / HALVES;
  __m512 acc[T * V];
  for (int i = 0; i < T * V; ++i) acc[i] = _mm512_setzero_ps();
  for (int g = 0; g < groups; ++g, u += kWideByte, q += T * 32, scale += T, sums += 2 * T) {
    ahead.ask();
#pragma GCC unroll 2
    for (int h = 0; h < HALVES; ++h) {
      __m512i c[T * V];
      for (int i = 0; i < T * V; ++i) c[i] = _mm512_setzero_si512();
#pragma GCC unroll 16
      for (int i = h * kUnits; i < (h + 1) * kUnits; ++i) {
        __m512i codes[V];
#pragma GCC unroll 2
        for (int v = 0; v < V; ++v) codes[v] = load512(u + (i * V + v) * 64);
#pragma GCC unroll 8
        for (int t = 0; t < T; ++t) {
          const __m512i x = bcast32_wide(q + t * 32 + 2 * i);
#pragma GCC unroll 2
          for (int v = 0; v < V; ++v) {
            c[t * V + v] = _mm512_dpwssd_epi32(c[t * V + v], codes[v], x);
            pin(c[t * V + v]);
          }
        }
      }
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) {
        const __m512 ad = _mm512_set1_ps(scale[t]);
        __m512 as = _mm512_setzero_ps();
        if constexpr (MIN) {
          as = _mm512_set1_ps(sums[h * T + t]);
          if constexpr (HALVES == 1) as = _mm512_add_ps(as, _mm512_set1_ps(sums[T + t]));
        }
#pragma GCC unroll 2
        for (int v = 0; v < V; ++v) {
          __m512& sum = acc[t * V + v];
          const __m512 ws = _mm512_load_ps(u + ((16 + h) * V + v) * 64);
          sum = _mm512_fmadd_ps(_mm512_mul_ps(ws, ad), _mm512_cvtepi32_ps(c[t * V + v]), sum);
          if constexpr (MIN) {
            sum = _mm512_fmadd_ps(_mm512_load_ps(u + ((16 + HALVES + h) * V + v) * 64), as, sum);
          }
        }
      }
    }
  }
  for (int i = 0; i < T * V; ++i) out[i] = acc[i];
}

// ---------------------------------------------------------------- loops over packs and tiles

// Both return the first row block that is left for the narrow loops.
template <bool F32>
int nibble_gemm_wide(const Weight& w, const Activations& a, const Output& o, int rb0, int rb1, uint8_t* scratch) {
  const size_t groups = static_cast<size_t>(w.groups()), stride = w.row_block_bytes();
  for (; rb0 + kPack <= rb1; rb0 += kPack) {
    const uint8_t* pack = w.data + static_cast<size_t>(rb0) * stride;
    nibble_unpack_wide<F32>(pack, stride, w.groups(), scratch);
    AheadOf ahead = ahead_of(pack, kPack * stride, w.groups(), a.num_tiles());
    for (int i = 0; i < a.num_tiles(); ++i) {
      const size_t row = static_cast<size_t>(a.tile_start(i));
      with_tile(a.tile_start(i + 1) - a.tile_start(i), [&]<int T>() {
        __m512 acc[T * V];
        nibble_tile_wide<T>(scratch, w.groups(), static_cast<const int8_t*>(a.q) + row * groups * 32,
                            a.scale + row * groups, a.sums + row * groups, ahead, acc);
        store_tile_wide<T>(acc, o, a.tile_start(i), rb0);
      });
    }
  }
  return rb0;
}

template <int HALVES, bool MIN, bool F32>
int byte_gemm_wide(const Weight& w, const Activations& a, const Output& o, int rb0, int rb1, uint8_t* scratch) {
  const size_t groups = static_cast<size_t>(w.groups()), stride = w.row_block_bytes();
  for (; rb0 + kPack <= rb1; rb0 += kPack) {
    const uint8_t* pack = w.data + static_cast<size_t>(rb0) * stride;
    byte_unpack_wide<HALVES, MIN, F32>(pack, stride, w.groups(), scratch);
    AheadOf ahead = ahead_of(pack, kPack * stride, w.groups(), a.num_tiles());
    for (int i = 0; i < a.num_tiles(); ++i) {
      const size_t row = static_cast<size_t>(a.tile_start(i));
      with_tile(a.tile_start(i + 1) - a.tile_start(i), [&]<int T>() {
        __m512 acc[T * V];
        byte_tile_wide<T, HALVES, MIN>(scratch, w.groups(), static_cast<const int16_t*>(a.q) + row * groups * 32,
                                       a.scale + row * groups, a.sums + row * groups * 2, ahead, acc);
        store_tile_wide<T>(acc, o, a.tile_start(i), rb0);
      });
    }
  }
  return rb0;
}

}  // namespace
}  // namespace firstlight::FIRSTLIGHT_GEMM_SET
