// Products with nibble weights, 8 outputs at a time.
//
// Two shapes of loop. With fewer than kUnpackRows rows of activations the codes are unpacked in registers as they
// stream from memory (decode is bound by memory). With more, row blocks are unpacked once into scratch that stays in
// the cache and is used for all tiles: two row blocks at a time, so that a broadcast of activations serves both.
#pragma once

#include "gemm_x86.h"

namespace firstlight::FIRSTLIGHT_GEMM_SET {
namespace {

constexpr int kUnpackRows = 5;           // from here on unpacking into scratch pays
constexpr size_t kNibbleUnpacked = 320;  // bytes of scratch per group and row block
constexpr int kMostSums = 8;             // of one inner loop: with more, operands spill out of the 16 registers

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

// Unpacks V row blocks side by side. Per group: codes [8 vectors][V][32 bytes], scales [V][8] float, mins [V][8] float.
template <bool F32, int V>
void nibble_unpack(const uint8_t* w, size_t stride, int groups, uint8_t* out) {
  constexpr size_t kScale = F32 ? 32 : 16;
  constexpr size_t kRecord = 2 * kScale + 128;
  const __m256i low = _mm256_set1_epi8(15);
  for (int g = 0; g < groups; ++g, w += kRecord, out += V * kNibbleUnpacked) {
    for (int v = 0; v < V; ++v) {
      const uint8_t* record = w + static_cast<size_t>(v) * stride;
      prefetch_record<kRecord>(record);
      for (int j = 0; j < 4; ++j) {
        const __m256i b = load256(record + 2 * kScale + 32 * j);
        store256(out + (j * V + v) * 32, _mm256_and_si256(b, low));
        store256(out + ((j + 4) * V + v) * 32, _mm256_and_si256(_mm256_srli_epi16(b, 4), low));
      }
      float* scales = reinterpret_cast<float*>(out + V * 256) + v * 8;
      _mm256_store_ps(scales, load_scales<F32>(record));
      _mm256_store_ps(scales + V * 8, load_scales<F32>(record + kScale));
    }
  }
}

// V unpacked row blocks times T rows out of a tile of LD; out is [V][LD].
template <int T, int LD, int V>
void nibble_tile(const uint8_t* u, int groups, const int8_t* q, const float* scale, const float* sums, AheadOf& ahead,
                 __m256* out) {
  __m256 acc[T * V];
  for (int i = 0; i < T * V; ++i) acc[i] = _mm256_setzero_ps();
  for (int g = 0; g < groups; ++g, u += V * kNibbleUnpacked, q += LD * 32, scale += LD, sums += LD) {
    ahead.ask();
    __m256i c[T * V];
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) {
      __m256i codes[V];
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) codes[v] = load256(u + (j * V + v) * 32);
#pragma GCC unroll 8
      for (int t = 0; t < T; ++t) {
        const __m256i x = bcast32(q + t * 32 + 4 * j);
#pragma GCC unroll 2
        for (int v = 0; v < V; ++v) {
          __m256i& sum = c[t * V + v];
          sum = j == 0 ? first_dot_codes(codes[v], x) : dot_codes(sum, codes[v], x);
          pin(sum);
        }
      }
    }
    const float* scales = reinterpret_cast<const float*>(u + V * 256);
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) {
      const __m256 ad = _mm256_broadcast_ss(scale + t), as = _mm256_broadcast_ss(sums + t);
#pragma GCC unroll 2
      for (int v = 0; v < V; ++v) {
        __m256& sum = acc[t * V + v];
        const __m256 ws = _mm256_load_ps(scales + v * 8), wm = _mm256_load_ps(scales + (V + v) * 8);
        sum = _mm256_fmadd_ps(_mm256_mul_ps(ws, ad), dots_as_float(c[t * V + v]), sum);
        sum = _mm256_fmadd_ps(wm, as, sum);
      }
    }
  }
  for (int t = 0; t < T; ++t) {
    for (int v = 0; v < V; ++v) out[v * LD + t] = acc[t * V + v];
  }
}

// All tiles against V unpacked row blocks from rb on.
template <bool F32, int V>
void nibble_row_blocks(const Weight& w, const Activations& a, const Output& o, int rb, uint8_t* scratch) {
  const int groups = w.groups();
  const size_t stride = w.row_block_bytes(), per_row = static_cast<size_t>(groups);
  const uint8_t* codes = w.data + static_cast<size_t>(rb) * stride;
  nibble_unpack<F32, V>(codes, stride, groups, scratch);
  AheadOf ahead = ahead_of(codes, V * stride, groups, a.num_tiles());
  for (int i = 0; i < a.num_tiles(); ++i) {
    const size_t row = static_cast<size_t>(a.tile_start(i));
    const int8_t* q = static_cast<const int8_t*>(a.q) + row * per_row * 32;
    const float *scale = a.scale + row * per_row, *sums = a.sums + row * per_row;
    with_tile(a.tile_start(i + 1) - a.tile_start(i), [&]<int T>() {
      __m256 out[V * T];
      if constexpr (V * T > kMostSums) {
        nibble_tile<T / 2, T, V>(scratch, groups, q, scale, sums, ahead, out);
        nibble_tile<T - T / 2, T, V>(scratch, groups, q + T / 2 * 32, scale + T / 2, sums + T / 2, ahead, out + T / 2);
      } else {
        nibble_tile<T, T, V>(scratch, groups, q, scale, sums, ahead, out);
      }
      for (int v = 0; v < V; ++v) store_tile<T>(out + v * T, o, a.tile_start(i), rb + v);
    });
  }
}

template <bool F32>
void nibble_gemm(const Weight& w, const Activations& a, const Output& o, int rb0, int rb1, uint8_t* scratch) {
  int rb = rb0;
  if (a.num_rows >= kUnpackRows) {
    for (; rb + 2 <= rb1; rb += 2) nibble_row_blocks<F32, 2>(w, a, o, rb, scratch);
    if (rb < rb1) nibble_row_blocks<F32, 1>(w, a, o, rb, scratch);
    return;
  }
  for (; rb < rb1; ++rb) {
    const uint8_t* codes = w.data + static_cast<size_t>(rb) * w.row_block_bytes();
    with_tile(a.num_rows, [&]<int T>() {
      if constexpr (T < kUnpackRows) {
        __m256 out[T];
        nibble_stream<T, F32>(codes, w.groups(), static_cast<const int8_t*>(a.q), a.scale, a.sums, out);
        store_tile<T>(out, o, 0, rb);
      }
    });
  }
}

}  // namespace
}  // namespace firstlight::FIRSTLIGHT_GEMM_SET
