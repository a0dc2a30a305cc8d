// Products of many rows of activations on the int8 tiles of AMX: 16 outputs (a pack of two row blocks) times up to 16
// rows.
//
// A tile product gives the sums of a group of inputs; their scales are applied on float vectors as everywhere else, and
// the sums reach those through memory. While tiles are in use, float products and conversions issue on one port only,
// so that part is what takes the time, and sums become float by a subtraction, which has a port of its own: a tile of
// sums starts not at 0 but at kFloatBits, so that its integers are the bits of the floats 1.5 * 2^23 + sum.
//
// The product of step i + 2, the storing of the sums of step i + 1 and the float part of step i run side by side, and
// during a pack's first tile of rows, the unpacking of step i + 4.
#define FIRSTLIGHT_GEMM_SET amx
#define FIRSTLIGHT_VNNI
#include <algorithm>

#include "gemm_wide.h"
#include "vector_x86.h"

namespace firstlight::amx {
namespace {

constexpr int kAmxRows = 16;  // of activations in a tile
constexpr int kAmxFrom = 6;   // rows of activations from which on tiles pay
constexpr int kAmxBlocks = 2;
constexpr int kAhead = 4;  // steps between unpacking codes and loading them as a tile

constexpr float kFloatOffset = 12582912.0f;  // 1.5 * 2^23: sums are far below 2^22
struct alignas(64) FloatBits {
  int32_t words[256] = {};
};
constexpr FloatBits float_bits() {
  FloatBits b;
  for (int32_t& word : b.words) word = 0x4b400000;
  return b;
}
constexpr FloatBits kFloatBits = float_bits();

struct alignas(64) TileSums {
  float rows[kAmxRows][16];
};

// Tiles 0 to 3 hold sums, 4 and 5 activations, 6 and 7 codes.
struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};
constexpr TileConfig config_for(int inputs) {
  TileConfig c;
  for (int i = 0; i < 8; ++i) {
    c.row_bytes[i] = static_cast<uint16_t>(i == 4 || i == 5 ? inputs : 64);
    c.rows[i] = static_cast<uint8_t>(i < 6 ? kAmxRows : inputs / 4);
  }
  return c;
}
constexpr TileConfig kConfig32 = config_for(32), kConfig16 = config_for(16);

struct TileMemory {
  char bytes[1024];
};
// Inline assembly, because the compiler's own tile functions make it keep every accumulator in memory.
template <int TILE>
inline void tile_load(const void* p, long row_bytes) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2"
               :
               : "r"(p), "r"(row_bytes), "i"(TILE), "m"(*static_cast<const TileMemory*>(p)));
}
template <int TILE>
inline void tile_store(TileSums* out) {
  asm volatile("tilestored %%tmm%c3, (%1,%2,1)" : "=m"(*out) : "r"(out), "r"(64L), "i"(TILE));
}
// Unsigned or signed bytes of activations times unsigned or signed codes.
template <int SUMS, int X, int CODES, bool X_SIGNED, bool CODES_SIGNED>
inline void tile_product() {
  tile_load<SUMS>(&kFloatBits, 64);
  if constexpr (!X_SIGNED) {
    asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUMS), "i"(X), "i"(CODES));
  } else if constexpr (CODES_SIGNED) {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUMS), "i"(X), "i"(CODES));
  } else {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(SUMS), "i"(X), "i"(CODES));
  }
}

// Two row blocks, `stride` bytes apart, and where they lie unpacked. At the end of a range both are the last one.
struct Pack {
  const uint8_t* data;
  size_t stride;
  uint8_t* unpacked;
};
// One tile of activations.
struct Rows {
  const uint8_t* q;
  const float* scale;
  const float* sums;
  int count;
};

inline __m512 sums_of(const float* sums) { return _mm512_sub_ps(_mm512_load_ps(sums), _mm512_set1_ps(kFloatOffset)); }

template <bool F32>
inline void store_scales(uint8_t* out, const uint8_t* a, const uint8_t* b) {
  _mm512_store_ps(out, _mm512_insertf32x8(_mm512_castps256_ps512(load_scales<F32>(a)), load_scales<F32>(b), 1));
}

template <bool F32>
struct Nibble {
  static constexpr int kStepsPerGroup = 1, kSumTiles = 1, kRowSums = 1;
  static constexpr size_t kUnpacked = 8 * 64 + 2 * 64, kActBytes = 32;
  static constexpr const TileConfig& kConfig = kConfig32;

  static void unpack(const Pack& p, int g) {
    constexpr size_t kScale = F32 ? 32 : 16;
    constexpr size_t kRecord = 2 * kScale + 128;
    const __m512i low = _mm512_set1_epi8(15);
    uint8_t* out = p.unpacked + static_cast<size_t>(g) * kUnpacked;
    const uint8_t* a = p.data + static_cast<size_t>(g) * kRecord;
    const uint8_t* b = a + p.stride;
    prefetch_record<kRecord>(a);
    prefetch_record<kRecord>(b);
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const size_t at = 2 * kScale + 32 * static_cast<size_t>(j);
      const __m512i codes = _mm512_inserti64x4(_mm512_castsi256_si512(load256(a + at)), load256(b + at), 1);
      _mm512_store_si512(out + j * 64, _mm512_and_si512(codes, low));
      _mm512_store_si512(out + (j + 4) * 64, _mm512_and_si512(_mm512_srli_epi16(codes, 4), low));
    }
    store_scales<F32>(out + 512, a, b);
    store_scales<F32>(out + 576, a + kScale, b + kScale);
  }

  template <int P>
  static void product(const uint8_t* q, long row_bytes, const uint8_t* unpacked) {
    tile_load<4 + P>(q, row_bytes);
    tile_load<6 + P>(unpacked, 64);
    tile_product<P, 4 + P, 6 + P, true, false>();
  }
  template <int P>
  static void store(TileSums* sums) {
    tile_store<P>(sums);
  }

  struct Scales {
    __m512 scale, min;
  };
  template <int P>
  static Scales scales(const uint8_t* unpacked) {
    return {_mm512_load_ps(unpacked + 512), _mm512_load_ps(unpacked + 576)};
  }
  template <int P>
  static __m512 add_row(__m512 acc, const float* sums, const Scales& s, const float* row_scale, const float* row_sum,
                        int) {
    acc = _mm512_fmadd_ps(_mm512_mul_ps(s.scale, _mm512_set1_ps(*row_scale)), sums_of(sums), acc);
    return _mm512_fmadd_ps(s.min, _mm512_set1_ps(*row_sum), acc);
  }
};

// Activations of 16 bits come as 32 low bytes, then 32 high ones: sum = 256 * high + low, rounded once as float.
template <int HALVES, bool MIN, bool F32>
struct Byte {
  using Record = ByteRecord<HALVES, MIN, F32>;
  static constexpr int kStepsPerGroup = HALVES, kSumTiles = 2, kRowSums = 2;
  static constexpr size_t kUnpacked = 8 * 64 + HALVES * (MIN ? 2 : 1) * 64, kActBytes = 64;
  static constexpr const TileConfig& kConfig = HALVES == 2 ? kConfig16 : kConfig32;

  static void unpack(const Pack& p, int step) {
    if (step % HALVES != 0) return;
    const size_t g = static_cast<size_t>(step / HALVES);
    uint8_t* out = p.unpacked + g * kUnpacked;
    const uint8_t* a = p.data + g * Record::kBytes;
    const uint8_t* b = a + p.stride;
    prefetch_record<Record::kBytes>(a);
    prefetch_record<Record::kBytes>(b);
#pragma GCC unroll 8
    for (int j = 0; j < 8; ++j) {
      store256(out + j * 64, fours(a + Record::kCodes + j * 32));
      store256(out + j * 64 + 32, fours(b + Record::kCodes + j * 32));
    }
    for (int h = 0; h < HALVES * (MIN ? 2 : 1); ++h) {
      store_scales<F32>(out + 512 + h * 64, a + h * Record::kScale, b + h * Record::kScale);
    }
  }
  // Codes of inputs 4j, 4j + 1 and of 4j + 2, 4j + 3 of eight outputs, as fours.
  static __m256i fours(const uint8_t* pairs) {
    const __m256i order = _mm256_setr_epi8(0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15, 0, 1, 8, 9, 2, 3, 10,
                                           11, 4, 5, 12, 13, 6, 7, 14, 15);
    return _mm256_shuffle_epi8(_mm256_permute4x64_epi64(load256(pairs), 0xd8), order);
  }

  // Of two steps in a group, the first is always even.
  template <int P>
  static constexpr int kHalf = HALVES == 2 ? P : 0;

  template <int P>
  static void product(const uint8_t* q, long row_bytes, const uint8_t* unpacked) {
    tile_load<4>(q + kHalf<P> * 16, row_bytes);
    tile_load<5>(q + kHalf<P> * 16 + 32, row_bytes);
    tile_load<6 + P>(unpacked + kHalf<P> * 256, 64);
    tile_product<2 * P, 4, 6 + P, false, true>();
    tile_product<2 * P + 1, 5, 6 + P, true, true>();
  }
  template <int P>
  static void store(TileSums* sums) {
    tile_store<2 * P>(sums);
    tile_store<2 * P + 1>(sums + 1);
  }

  struct Scales {
    __m512 scale, min;
  };
  template <int P>
  static Scales scales(const uint8_t* unpacked) {
    const uint8_t* at = unpacked + 512 + kHalf<P> * 64;
    return {_mm512_load_ps(at), MIN ? _mm512_load_ps(at + HALVES * 64) : _mm512_setzero_ps()};
  }
  template <int P>
  static __m512 add_row(__m512 acc, const float* sums, const Scales& s, const float* row_scale, const float* row_sum,
                        int rows) {
    const __m512 sum = _mm512_fmadd_ps(_mm512_set1_ps(256.0f), sums_of(sums + kAmxRows * 16), sums_of(sums));
    acc = _mm512_fmadd_ps(_mm512_mul_ps(s.scale, _mm512_set1_ps(*row_scale)), sum, acc);
    if constexpr (MIN) {
      __m512 both = _mm512_set1_ps(row_sum[kHalf<P> * rows]);
      if constexpr (HALVES == 1) both = _mm512_add_ps(both, _mm512_set1_ps(row_sum[rows]));
      acc = _mm512_fmadd_ps(s.min, both, acc);
    }
    return acc;
  }
};

// A pack times one tile of at most T rows. What rows past the tile's last one give is never stored.
template <class K, int T, bool UNPACK>
void tile_of_rows(const Pack& p, const Rows& a, int groups, TileSums* sums, AheadOf& ahead, const Output& o,
                  int first_row, int rb) {
  const int steps = groups * K::kStepsPerGroup, count = a.count;
  __m512 acc[T];
  repeat<T>([&]<int I>() __attribute__((always_inline)) { acc[I] = _mm512_setzero_ps(); });

  const uint8_t *q = a.q, *codes = p.unpacked;  // of the next product
  const uint8_t* scaled = p.unpacked;           // of the step whose sums are scaled
  const float *row_scale = a.scale, *row_sum = a.sums;
  const auto product = [&]<int P>() __attribute__((always_inline)) {
    K::template product<P>(q, K::kActBytes, codes);
    if constexpr (P == 1 || K::kStepsPerGroup == 1) {
      q += static_cast<size_t>(count) * K::kActBytes;
      codes += K::kUnpacked;
    }
  };
  const auto step = [&]<int P>(int i) __attribute__((always_inline)) {
    if constexpr (UNPACK) {
      ahead.ask();
      if (i + kAhead < steps) K::unpack(p, i + kAhead);
    }
    if (i + 2 < steps) product.template operator()<P>();
    const auto scales = K::template scales<P>(scaled);
    const float* s = sums[P * K::kSumTiles].rows[0];
    const auto add = [&]<int R>() __attribute__((always_inline)) {
      acc[R] = K::template add_row<P>(acc[R], s + R * 16, scales, row_scale + R, row_sum + R, count);
    };
    repeat<T / 2>([&]<int I>() __attribute__((always_inline)) { add.template operator()<I>(); });
    if (i + 1 < steps) K::template store<1 - P>(sums + (1 - P) * K::kSumTiles);
    repeat<T / 2>([&]<int I>() __attribute__((always_inline)) { add.template operator()<T / 2 + I>(); });
    if constexpr (P == 1 || K::kStepsPerGroup == 1) {
      scaled += K::kUnpacked;
      row_scale += count;
      row_sum += K::kRowSums * count;
    }
  };
  if constexpr (UNPACK) {
    for (int i = 0; i < std::min(kAhead, steps); ++i) K::unpack(p, i);
  }
  product.template operator()<0>();
  if (steps > 1) product.template operator()<1>();
  K::template store<0>(sums);
  for (int i = 0; i < steps; i += 2) {
    step.template operator()<0>(i);
    if (i + 1 < steps) step.template operator()<1>(i + 1);
  }
  float* y = o.y + static_cast<size_t>(first_row) * o.ldy;
  repeat<T>([&]<int I>() __attribute__((always_inline)) {
    if (I < count) store_outputs_wide(acc[I], o.bias, o.accumulate, y + static_cast<size_t>(I) * o.ldy, rb * 8, o.rows);
  });
}

template <class K, bool UNPACK>
void tile_of(const Pack& p, const Rows& a, int groups, TileSums* sums, AheadOf& ahead, const Output& o, int first_row,
             int rb) {
  if (a.count <= 8) return tile_of_rows<K, 8, UNPACK>(p, a, groups, sums, ahead, o, first_row, rb);
  if (a.count <= 12) return tile_of_rows<K, 12, UNPACK>(p, a, groups, sums, ahead, o, first_row, rb);
  tile_of_rows<K, 16, UNPACK>(p, a, groups, sums, ahead, o, first_row, rb);
}

template <class K>
void tiled_gemm(const Weight& w, const Activations& a, Output o, int rb0, int rb1, uint8_t* scratch) {
  asm volatile("ldtilecfg %0" : : "m"(K::kConfig));
  const int groups = w.groups();
  const size_t per_row = static_cast<size_t>(groups), stride = w.row_block_bytes();
  TileSums* sums = reinterpret_cast<TileSums*>(scratch);
  uint8_t* unpacked = scratch + 2 * K::kSumTiles * sizeof(TileSums);
  o.rows = std::min(o.rows, rb1 * 8);
  for (int rb = rb0; rb < rb1; rb += kAmxBlocks) {
    const Pack p{w.data + static_cast<size_t>(rb) * stride, rb + 1 < rb1 ? stride : 0, unpacked};
    AheadOf ahead = ahead_of(p.data, kAmxBlocks * stride, groups * K::kStepsPerGroup, 1);
    for (int i = 0; i < a.num_tiles(); ++i) {
      const int first = a.tile_start(i);
      const size_t before = static_cast<size_t>(first) * per_row;
      const size_t sums_per_group = a.kind == ActKind::kInt16 ? 2 : 1;
      const Rows rows{static_cast<const uint8_t*>(a.q) + before * K::kActBytes, a.scale + before,
                      a.sums + before * sums_per_group, a.tile_start(i + 1) - first};
      if (i == 0) {
        tile_of<K, true>(p, rows, groups, sums, ahead, o, first, rb);
      } else {
        tile_of<K, false>(p, rows, groups, sums, ahead, o, first, rb);
      }
    }
  }
  asm volatile("tilerelease");
}

template <int HALVES>
void byte_of_group(const Weight& w, const Activations& a, const Output& o, int rb0, int rb1, uint8_t* scratch) {
  if (w.has_min) {
    return w.scale_f32 ? tiled_gemm<Byte<HALVES, true, true>>(w, a, o, rb0, rb1, scratch)
                       : tiled_gemm<Byte<HALVES, true, false>>(w, a, o, rb0, rb1, scratch);
  }
  return w.scale_f32 ? tiled_gemm<Byte<HALVES, false, true>>(w, a, o, rb0, rb1, scratch)
                     : tiled_gemm<Byte<HALVES, false, false>>(w, a, o, rb0, rb1, scratch);
}

}  // namespace

ActLayout act_layout(ActKind kind, int num_rows) {
  if (kind == ActKind::kFloat || num_rows < kAmxFrom) return {};
  return {kAmxRows, kind == ActKind::kInt16};
}

void gemm(const Weight& w, const Activations& a, const float* bias, bool accumulate, float* y, size_t ldy, int rb0,
          int rb1, uint8_t* scratch) {
  if (a.layout.tile_rows == kTile) return vnni::gemm(w, a, bias, accumulate, y, ldy, rb0, rb1, scratch);
  if (rb0 >= rb1) return;
  const Output o{bias, accumulate, y, ldy, w.rows};
  if (w.kind == LayoutKind::kNibble) {
    return w.scale_f32 ? tiled_gemm<Nibble<true>>(w, a, o, rb0, rb1, scratch)
                       : tiled_gemm<Nibble<false>>(w, a, o, rb0, rb1, scratch);
  }
  return w.group == 32 ? byte_of_group<1>(w, a, o, rb0, rb1, scratch) : byte_of_group<2>(w, a, o, rb0, rb1, scratch);
}

}  // namespace firstlight::amx
