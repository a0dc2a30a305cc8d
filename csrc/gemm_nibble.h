// Products with nibble weights, 8 outputs at a time.
//
// Two shapes of loop. With fewer than kUnpackRows rows of activations the codes are unpacked in registers as they
// stream from memory (decode is bound by memory). With more, a row block is unpacked once into scratch that stays in
// the L1 cache and is used for all tiles; six rows of activations share each load.
#pragma once

#include "gemm_x86.h"

namespace firstlight::FIRSTLIGHT_GEMM_SET {
namespace {

constexpr int kUnpackRows = 5;           // from here on unpacking into scratch pays
constexpr size_t kNibbleUnpacked = 320;  // bytes of scratch per group

// Streams one row block for T <= 4 rows of activations.
template <int T, bool F32>
void nibble_stream(const uint8_t* w, int groups, const int8_t* q, const float* scale, const float* sums, __m256* out) {
  constexpr size_t kScale = F32 ? 32 : 16;
  constexpr size_t kRecord = 2 * kScale + 128;
  const __m256i low = _mm256_set1_epi8(15);
  __m256 acc[T];
  for (int t = 0; t < T; ++t) acc[t] = _mm256_setzero_ps();
  for (int g = 0; g < groups; ++g, w += kRecord, q += T * 32, scale += T, sums += T) {
    prefetch_record<kRecord>(w);
    const __m256 ws = load_scales<F32>(w);
    const __m256 wm = load_scales<F32>(w + kScale);
    __m256i v[8];
    for (int j = 0; j < 4; ++j) {
      const __m256i b = load256(w + 2 * kScale + 32 * j);
      v[j] = _mm256_and_si256(b, low);
      v[j + 4] = _mm256_and_si256(_mm256_srli_epi16(b, 4), low);
    }
    for (int t = 0; t < T; ++t) {
      const int8_t* p = q + t * 32;
      __m256i c0 = first_dot_codes(v[0], bcast32(p));
      __m256i c1 = first_dot_codes(v[1], bcast32(p + 4));
      c0 = dot_codes(c0, v[2], bcast32(p + 8));
      c1 = dot_codes(c1, v[3], bcast32(p + 12));
      c0 = dot_codes(c0, v[4], bcast32(p + 16));
      c1 = dot_codes(c1, v[5], bcast32(p + 20));
      c0 = dot_codes(c0, v[6], bcast32(p + 24));
      c1 = dot_codes(c1, v[7], bcast32(p + 28));
      const __m256 f = dots_as_float(add_dots(c0, c1));
      acc[t] = _mm256_fmadd_ps(_mm256_mul_ps(ws, _mm256_broadcast_ss(scale + t)), f, acc[t]);
      acc[t] = _mm256_fmadd_ps(wm, _mm256_broadcast_ss(sums + t), acc[t]);
    }
  }
  for (int t = 0; t < T; ++t) out[t] = acc[t];
}

// Unpacks one row block. Per group: codes [8 vectors][32 bytes], scales [8] float, mins [8] float.
template <bool F32>
void nibble_unpack(const uint8_t* w, int groups, uint8_t* out) {
  constexpr size_t kScale = F32 ? 32 : 16;
  constexpr size_t kRecord = 2 * kScale + 128;
  const __m256i low = _mm256_set1_epi8(15);
  for (int g = 0; g < groups; ++g, w += kRecord, out += kNibbleUnpacked) {
    prefetch_record<kRecord>(w);
    for (int j = 0; j < 4; ++j) {
      const __m256i b = load256(w + 2 * kScale + 32 * j);
      store256(out + j * 32, _mm256_and_si256(b, low));
      store256(out + (j + 4) * 32, _mm256_and_si256(_mm256_srli_epi16(b, 4), low));
    }
    _mm256_store_ps(reinterpret_cast<float*>(out + 256), load_scales<F32>(w));
    _mm256_store_ps(reinterpret_cast<float*>(out + 288), load_scales<F32>(w + kScale));
  }
}

// One unpacked row block times T rows of activations.
template <int T>
void nibble_tile(const uint8_t* u, int groups, const int8_t* q, const float* scale, const float* sums, __m256* out) {
  __m256 acc[T];
  for (int t = 0; t < T; ++t) acc[t] = _mm256_setzero_ps();
  for (int g = 0; g < groups; ++g, u += kNibbleUnpacked, q += T * 32, scale += T, sums += T) {
    __m256i c[T];
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) {
      const __m256i v = load256(u + j * 32);
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) {
        const __m256i x = bcast32(q + t * 32 + 4 * j);
        c[t] = j == 0 ? first_dot_codes(v, x) : dot_codes(c[t], v, x);
        pin(c[t]);
      }
    }
    const __m256 ws = _mm256_load_ps(reinterpret_cast<const float*>(u + 256));
    const __m256 wm = _mm256_load_ps(reinterpret_cast<const float*>(u + 288));
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) {
      const __m256 f = dots_as_float(c[t]);
      acc[t] = _mm256_fmadd_ps(_mm256_mul_ps(ws, _mm256_broadcast_ss(scale + t)), f, acc[t]);
      acc[t] = _mm256_fmadd_ps(wm, _mm256_broadcast_ss(sums + t), acc[t]);
    }
  }
  for (int t = 0; t < T; ++t) out[t] = acc[t];
}

template <bool F32>
void nibble_gemm(const Weight& w, const Activations& a, const Output& o, int rb0, int rb1, uint8_t* scratch) {
  const int groups = w.groups(), tiles = a.num_tiles();
  const size_t stride = w.row_block_bytes();
  for (int rb = rb0; rb < rb1; ++rb) {
    const uint8_t* codes = w.data + static_cast<size_t>(rb) * stride;
    const bool unpacked = a.num_rows >= kUnpackRows;
    if (unpacked) nibble_unpack<F32>(codes, groups, scratch);
    for (int i = 0; i < tiles; ++i) {
      const int row = a.tile_start(i), rows = a.tile_start(i + 1) - row;
      const int8_t* q = static_cast<const int8_t*>(a.q) + static_cast<size_t>(row) * static_cast<size_t>(a.cols);
      const float* scale = a.scale + static_cast<size_t>(row) * static_cast<size_t>(groups);
      const float* sums = a.sums + static_cast<size_t>(row) * static_cast<size_t>(groups);
      with_tile(rows, [&]<int T>() {
        __m256 acc[T];
        if (unpacked) {
          nibble_tile<T>(scratch, groups, q, scale, sums, acc);
        } else if constexpr (T < kUnpackRows) {
          nibble_stream<T, F32>(codes, groups, q, scale, sums, acc);
        }
        store_tile<T>(acc, o, row, rb);
      });
    }
  }
}

}  // namespace
}  // namespace firstlight::FIRSTLIGHT_GEMM_SET
