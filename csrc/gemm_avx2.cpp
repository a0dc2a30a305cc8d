// AVX2 matrix products. See gemm.h for the order of operations, which is the same as in gemm_scalar.cpp.
//
// Two shapes of loop. With fewer than kUnpackRows rows of activations the codes are unpacked in registers as they
// stream from memory (decode is bound by memory). With more, a row block is unpacked once into scratch that stays in
// the L1 cache and is used for all tiles; six rows of activations share each load.
#include <immintrin.h>

#include <cstring>

#include "gemm.h"

// gemm_vnni.cpp compiles this file again with the dot-product instructions. Integer sums are exact either way, so both
// give the same bits.
#ifndef FIRSTLIGHT_GEMM_SET
#define FIRSTLIGHT_GEMM_SET avx2
#endif

namespace firstlight::FIRSTLIGHT_GEMM_SET {
namespace {

constexpr int kUnpackRows = 5;      // from here on unpacking into scratch pays
constexpr int kWidenRows = 4;       // the same for byte codes
constexpr size_t kPrefetch = 1536;  // bytes ahead on the weight stream in the memory-bound loops

template <bool F32>
inline __m256 load_scales(const uint8_t* p) {
  if constexpr (F32) {
    return _mm256_loadu_ps(reinterpret_cast<const float*>(p));
  } else {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  }
}

template <size_t BYTES>
inline void prefetch_record(const uint8_t* p) {
  for (size_t i = 0; i < BYTES; i += 64) _mm_prefetch(reinterpret_cast<const char*>(p + kPrefetch + i), _MM_HINT_T0);
}

constexpr size_t kNibbleUnpacked = 320;  // bytes of scratch per group
constexpr size_t kByteUnpacked = 640;    // bytes of scratch per 32 inputs

// Keeps the compiler from rearranging a chain of integer sums, which costs it more registers than there are.
#ifdef FIRSTLIGHT_VNNI
inline void pin(__m256i& v) { asm("" : "+v"(v)); }
#else
inline void pin(__m256i& v) { asm("" : "+x"(v)); }
#endif

// Sums of codes (0..15) times int8 values: 16 bits hold those of a whole group, VNNI sums fours in 32 bits at once.
inline __m256i dot_codes(__m256i sum, __m256i codes, __m256i values) {
#ifdef FIRSTLIGHT_VNNI
  return _mm256_dpbusd_epi32(sum, codes, values);
#else
  return _mm256_add_epi16(sum, _mm256_maddubs_epi16(codes, values));
#endif
}
inline __m256i first_dot_codes(__m256i codes, __m256i values) {
#ifdef FIRSTLIGHT_VNNI
  return _mm256_dpbusd_epi32(_mm256_setzero_si256(), codes, values);
#else
  return _mm256_maddubs_epi16(codes, values);
#endif
}
inline __m256i add_dots(__m256i a, __m256i b) {
#ifdef FIRSTLIGHT_VNNI
  return _mm256_add_epi32(a, b);
#else
  return _mm256_add_epi16(a, b);
#endif
}
// The eight sums of a group as float.
inline __m256 dots_as_float(__m256i sums) {
#ifdef FIRSTLIGHT_VNNI
  return _mm256_cvtepi32_ps(sums);
#else
  return _mm256_cvtepi32_ps(_mm256_madd_epi16(sums, _mm256_set1_epi16(1)));
#endif
}
// Sums of 16-bit pairs.
inline __m256i dot_words(__m256i sum, __m256i a, __m256i b) {
#ifdef FIRSTLIGHT_VNNI
  return _mm256_dpwssd_epi32(sum, a, b);
#else
  return _mm256_add_epi32(sum, _mm256_madd_epi16(a, b));
#endif
}

inline void store256(void* p, __m256i v) { _mm256_store_si256(static_cast<__m256i*>(p), v); }
inline __m256i load256(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline __m256i bcast32(const void* p) { return _mm256_castps_si256(_mm256_broadcast_ss(static_cast<const float*>(p))); }

// Writes 8 outputs of one activation row, or fewer at the matrix's ragged end.
inline void store_outputs(__m256 acc, const float* bias, bool accumulate, float* y, int row, int rows) {
  const int left = rows - row;
  if (left >= 8) {
    if (bias) acc = _mm256_add_ps(acc, _mm256_loadu_ps(bias + row));
    if (accumulate) acc = _mm256_add_ps(_mm256_loadu_ps(y + row), acc);
    _mm256_storeu_ps(y + row, acc);
    return;
  }
  alignas(32) float out[8];
  _mm256_store_ps(out, acc);
  for (int r = 0; r < left; ++r) {
    float v = out[r];
    if (bias) v += bias[row + r];
    if (accumulate) v = y[row + r] + v;
    y[row + r] = v;
  }
}

// ---------------------------------------------------------------- nibble

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

// ---------------------------------------------------------------- byte

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

// ---------------------------------------------------------------- half, bf16, float

template <LayoutKind KIND>
inline __m256 load_row8(const uint8_t* p) {
  if constexpr (KIND == LayoutKind::kFloat) {
    return _mm256_loadu_ps(reinterpret_cast<const float*>(p));
  } else if constexpr (KIND == LayoutKind::kHalf) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  } else {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
  }
}

// R row blocks times T rows of activations: R * T independent chains, each in the order of k.
template <LayoutKind KIND, int R, int T>
void float_tile(const uint8_t* w, size_t row_block_bytes, int cols, const float* x, __m256* out) {
  constexpr size_t kRecord = KIND == LayoutKind::kFloat ? 32 : 16;
  __m256 acc[R * T];
  for (int i = 0; i < R * T; ++i) acc[i] = _mm256_setzero_ps();
  for (int k = 0; k < cols; ++k, w += kRecord, x += T) {
    __m256 v[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) v[r] = load_row8<KIND>(w + static_cast<size_t>(r) * row_block_bytes);
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) {
      const __m256 b = _mm256_broadcast_ss(x + t);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) acc[r * T + t] = _mm256_fmadd_ps(v[r], b, acc[r * T + t]);
    }
  }
  for (int i = 0; i < R * T; ++i) out[i] = acc[i];
}

// ---------------------------------------------------------------- loops over tiles and row blocks

struct Output {
  const float* bias;
  bool accumulate;
  float* y;
  size_t ldy;
  int rows;
};

template <int T>
inline void store_tile(const __m256* acc, const Output& o, int first_row, int rb) {
#pragma GCC unroll 8
  for (int t = 0; t < T; ++t) {
    store_outputs(acc[t], o.bias, o.accumulate, o.y + static_cast<size_t>(first_row + t) * o.ldy, rb * 8, o.rows);
  }
}

// Calls f.template operator()<T>() with T = rows, 1..kTile.
template <typename F>
inline void with_tile(int rows, const F& f) {
  switch (rows) {
    case 1:
      return f.template operator()<1>();
    case 2:
      return f.template operator()<2>();
    case 3:
      return f.template operator()<3>();
    case 4:
      return f.template operator()<4>();
    case 5:
      return f.template operator()<5>();
    default:
      return f.template operator()<6>();
  }
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

template <LayoutKind KIND>
void float_gemm(const Weight& w, const Activations& a, const Output& o, int rb0, int rb1) {
  const int tiles = a.num_tiles();
  const size_t stride = w.row_block_bytes();
  for (int rb = rb0; rb < rb1;) {
    const int left = rb1 - rb;
    int step = 1;
    for (int i = 0; i < tiles; ++i) {
      const int row = a.tile_start(i), rows = a.tile_start(i + 1) - row;
      const float* x = static_cast<const float*>(a.q) + static_cast<size_t>(row) * static_cast<size_t>(a.cols);
      const uint8_t* values = w.data + static_cast<size_t>(rb) * stride;
      with_tile(rows, [&]<int T>() {
        constexpr int kWide = T <= 2 ? 4 : 2;
        __m256 acc[kWide * T];
        step = left >= kWide ? kWide : 1;
        if (step == kWide) {
          float_tile<KIND, kWide, T>(values, stride, w.cols, x, acc);
        } else {
          float_tile<KIND, 1, T>(values, stride, w.cols, x, acc);
        }
        for (int r = 0; r < step; ++r) store_tile<T>(acc + r * T, o, row, rb + r);
      });
    }
    rb += step;
  }
}

}  // namespace

void gemm(const Weight& w, const Activations& a, const float* bias, bool accumulate, float* y, size_t ldy, int rb0,
          int rb1, uint8_t* scratch) {
  const Output o{bias, accumulate, y, ldy, w.rows};
  switch (w.kind) {
    case LayoutKind::kNibble:
      return w.scale_f32 ? nibble_gemm<true>(w, a, o, rb0, rb1, scratch)
                         : nibble_gemm<false>(w, a, o, rb0, rb1, scratch);
    case LayoutKind::kByte:
      if (w.group == 32) {
        if (w.has_min) {
          return w.scale_f32 ? byte_gemm<1, true, true>(w, a, o, rb0, rb1, scratch)
                             : byte_gemm<1, true, false>(w, a, o, rb0, rb1, scratch);
        }
        return w.scale_f32 ? byte_gemm<1, false, true>(w, a, o, rb0, rb1, scratch)
                           : byte_gemm<1, false, false>(w, a, o, rb0, rb1, scratch);
      }
      if (w.has_min) {
        return w.scale_f32 ? byte_gemm<2, true, true>(w, a, o, rb0, rb1, scratch)
                           : byte_gemm<2, true, false>(w, a, o, rb0, rb1, scratch);
      }
      return w.scale_f32 ? byte_gemm<2, false, true>(w, a, o, rb0, rb1, scratch)
                         : byte_gemm<2, false, false>(w, a, o, rb0, rb1, scratch);
    case LayoutKind::kHalf:
      return float_gemm<LayoutKind::kHalf>(w, a, o, rb0, rb1);
    case LayoutKind::kBf16:
      return float_gemm<LayoutKind::kBf16>(w, a, o, rb0, rb1);
    case LayoutKind::kFloat:
      return float_gemm<LayoutKind::kFloat>(w, a, o, rb0, rb1);
  }
}

}  // namespace firstlight::FIRSTLIGHT_GEMM_SET
