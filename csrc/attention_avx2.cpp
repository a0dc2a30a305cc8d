// AVX2 attention over paged float16 KV. Keys lie dimension-major inside a block, so 8 lanes are 8 keys and no score
// needs a horizontal sum; values lie token-major, so 8 lanes are 8 dimensions. Many query rows share one conversion of
// the split.
#include <immintrin.h>

#include "attention.h"
#include "math_avx2.h"

namespace firstlight::avx2 {
namespace {

constexpr int kConvertRows = 12;  // from this many query rows on, converting the split once pays

inline __m256 load_half8(const uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
template <typename T>
inline __m256 load8(const T* p) {
  if constexpr (sizeof(T) == 2) {
    return load_half8(p);
  } else {
    return _mm256_loadu_ps(p);
  }
}

// Memory to ask for while 16 keys are scored, two lines for every two dimensions: blocks lie scattered, which the
// processor's own prefetcher cannot follow. Null pointers ask for nothing.
struct Ahead {
  const char* keys = nullptr;
  const char* values = nullptr;
};

// Scores of R rows against 16 keys: k is [head_dim] steps of `stride`, qt is [head_dim][R].
template <int R, bool PREFETCH, typename T>
inline void score16(const T* k, size_t stride, const float* qt, int dim, float* s, const Ahead& ahead) {
  __m256 acc[2 * R];
#pragma GCC unroll 16
  for (int i = 0; i < 2 * R; ++i) acc[i] = _mm256_setzero_ps();
  for (int d = 0; d < dim; d += 2) {
    if constexpr (PREFETCH) {
      _mm_prefetch(ahead.keys + 32 * d, _MM_HINT_T0);
      _mm_prefetch(ahead.values + 32 * d, _MM_HINT_T0);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i, k += stride, qt += R) {
      const __m256 k0 = load8(k), k1 = load8(k + 8);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const __m256 q = _mm256_broadcast_ss(qt + r);
        acc[2 * r] = _mm256_fmadd_ps(q, k0, acc[2 * r]);
        acc[2 * r + 1] = _mm256_fmadd_ps(q, k1, acc[2 * r + 1]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    _mm256_store_ps(s + r * kSplit, acc[2 * r]);
    _mm256_store_ps(s + r * kSplit + 8, acc[2 * r + 1]);
  }
}

// o += p * v over `keys` keys of one block (or of the converted split) for R rows and N vectors of 8 dimensions.
template <int R, int N, typename T>
inline void weigh(const T* v, int keys, size_t stride, const float* p, float* o, size_t o_stride) {
  __m256 acc[R * N];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) acc[r * N + n] = _mm256_loadu_ps(o + static_cast<size_t>(r) * o_stride + n * 8);
  }
  for (int key = 0; key < keys; ++key, v += stride) {
    __m256 x[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) x[n] = load8(v + 8 * n);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const __m256 w = _mm256_broadcast_ss(p + r * kSplit + key);
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) acc[r * N + n] = _mm256_fmadd_ps(w, x[n], acc[r * N + n]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) _mm256_storeu_ps(o + static_cast<size_t>(r) * o_stride + n * 8, acc[r * N + n]);
  }
}

template <int R, typename T>
inline void weigh_all(const T* v, int keys, int dim, const float* p, float* o, size_t o_stride) {
  constexpr int kWide = R <= 1 ? 8 : R <= 3 ? 4 : 2;
  const size_t stride = static_cast<size_t>(dim);
  int d = 0;
  for (; d + 8 * kWide <= dim; d += 8 * kWide) weigh<R, kWide>(v + d, keys, stride, p, o + d, o_stride);
  for (; d < dim; d += 8) weigh<R, 1>(v + d, keys, stride, p, o + d, o_stride);
}

// Turns one row's scores of `num` keys (a multiple of 16) into weights in place. Returns through m and l.
inline void softmax_row(float* s, int num, int low, int high, float soft_cap, float* m, float* l) {
  const __m256 lowest = _mm256_set1_ps(-__builtin_inff());
  const __m256i step = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  __m256 max8 = lowest;
  for (int i = 0; i < num; i += 8) {
    __m256 v = _mm256_load_ps(s + i);
    if (soft_cap > 0.0f) v = _mm256_mul_ps(_mm256_set1_ps(soft_cap), tanh8(_mm256_div_ps(v, _mm256_set1_ps(soft_cap))));
    if (i < low || i + 8 > high) {
      const __m256i key = _mm256_add_epi32(_mm256_set1_epi32(i), step);
      const __m256i visible = _mm256_andnot_si256(_mm256_cmpgt_epi32(_mm256_set1_epi32(low), key),
                                                  _mm256_cmpgt_epi32(_mm256_set1_epi32(high), key));
      v = _mm256_blendv_ps(lowest, v, _mm256_castsi256_ps(visible));
    }
    _mm256_store_ps(s + i, v);
    max8 = _mm256_max_ps(v, max8);
  }
  const float max = lane_max8(max8);
  const __m256 max_all = _mm256_set1_ps(max);
  __m256 sum = _mm256_setzero_ps();
  for (int i = 0; i < num; i += 8) {
    const __m256 p = exp8(_mm256_sub_ps(_mm256_load_ps(s + i), max_all));
    _mm256_store_ps(s + i, p);
    sum = _mm256_add_ps(sum, p);
  }
  *m = max;
  *l = lane_sum8(sum);
}

struct Split {
  const KvView& kv;
  const SplitQuery& query;
  int begin;
  float* qt;
  float* scores;
  float* keys32;    // [16-key chunk][head_dim][16] when converted
  float* values32;  // [key][head_dim]
};

// What to ask for while the 16 keys at `key` of the split are scored: the keys two chunks on, and this chunk's values,
// which are read once all scores are there. Past the split's end it repeats what is at hand.
inline Ahead ahead_of(const Split& s, int key, int num) {
  const auto at = [&](int k) { return s.begin + (k < num ? k : key); };
  const auto block = [&](int k) { return s.query.block_table[at(k) / s.kv.block_size]; };
  const uint16_t* keys = s.kv.keys(block(key + 32), s.query.kv_head) + at(key + 32) % s.kv.block_size * s.kv.head_dim;
  const uint16_t* values = s.kv.values(block(key), s.query.kv_head) + at(key) % s.kv.block_size * s.kv.head_dim;
  return {reinterpret_cast<const char*>(keys), reinterpret_cast<const char*>(values)};
}

template <int R, bool CONVERTED>
void attend_rows(const Split& s, int row, float* result) {
  const int dim = s.kv.head_dim, block_size = s.kv.block_size;
  const size_t out_stride = split_result_floats(dim);
  int high = 0, low = kSplit;
  for (int r = 0; r < R; ++r) {
    const int limit = s.query.limit[row + r] - s.begin, first = s.query.first[row + r] - s.begin;
    high = limit > high ? limit : high;
    low = first < low ? first : low;
    const float* q = s.query.q + static_cast<size_t>(row + r) * static_cast<size_t>(dim);
    float* o = result + static_cast<size_t>(row + r) * out_stride;
    for (int d = 0; d < dim; ++d) s.qt[d * R + r] = q[d];
    for (int d = 0; d < dim; ++d) o[d] = 0.0f;
  }
  high = high < kSplit ? high : kSplit;
  low = low > 0 ? low / 16 * 16 : 0;
  const int num = (high + 15) / 16 * 16;
  float* o = result + static_cast<size_t>(row) * out_stride;
  if (low >= high) {  // no row of the group sees a key here
    for (int r = 0; r < R; ++r) {
      o[static_cast<size_t>(r) * out_stride + static_cast<size_t>(dim)] = -__builtin_inff();
      o[static_cast<size_t>(r) * out_stride + static_cast<size_t>(dim) + 1] = 0.0f;
    }
    return;
  }
  for (int key = 0; key < low; key += 8) {
    for (int r = 0; r < R; ++r) _mm256_store_ps(s.scores + r * kSplit + key, _mm256_setzero_ps());
  }
  for (int key = low; key < num; key += 16) {
    if constexpr (CONVERTED) {
      score16<R, false>(s.keys32 + static_cast<size_t>(key) * static_cast<size_t>(dim), 16, s.qt, dim, s.scores + key,
                        Ahead{});
    } else {
      const int at = s.begin + key;
      const uint16_t* k = s.kv.keys(s.query.block_table[at / block_size], s.query.kv_head) + at % block_size;
      score16<R, true>(k, static_cast<size_t>(block_size), s.qt, dim, s.scores + key, ahead_of(s, key, num));
    }
  }
  for (int r = 0; r < R; ++r) {
    float* tail = o + static_cast<size_t>(r) * out_stride + static_cast<size_t>(dim);
    softmax_row(s.scores + r * kSplit, num, s.query.first[row + r] - s.begin, s.query.limit[row + r] - s.begin,
                s.query.soft_cap, tail, tail + 1);
  }
  // Keys before `low` have weight 0 and are skipped: adding 0 * v changes nothing.
  if constexpr (CONVERTED) {
    weigh_all<R>(s.values32 + static_cast<size_t>(low) * static_cast<size_t>(dim), high - low, dim, s.scores + low, o,
                 out_stride);
  } else {
    for (int key = low; key < high;) {
      const int at = s.begin + key, slot = at % block_size;
      const int count = block_size - slot < high - key ? block_size - slot : high - key;
      const uint16_t* v = s.kv.values(s.query.block_table[at / block_size], s.query.kv_head) +
                          static_cast<size_t>(slot) * static_cast<size_t>(dim);
      weigh_all<R>(v, count, dim, s.scores + key, o, out_stride);
      key += count;
    }
  }
}

template <bool CONVERTED>
void attend_groups(const Split& s, float* result) {
  const int rows = s.query.num_rows, groups = (rows + kQueryGroup - 1) / kQueryGroup;
  for (int g = 0, row = 0; g < groups; ++g) {
    const int size = rows / groups + (g < rows % groups ? 1 : 0);
    switch (size) {
      case 1:
        attend_rows<1, CONVERTED>(s, row, result);
        break;
      case 2:
        attend_rows<2, CONVERTED>(s, row, result);
        break;
      case 3:
        attend_rows<3, CONVERTED>(s, row, result);
        break;
      case 4:
        attend_rows<4, CONVERTED>(s, row, result);
        break;
      case 5:
        attend_rows<5, CONVERTED>(s, row, result);
        break;
      default:
        attend_rows<6, CONVERTED>(s, row, result);
        break;
    }
    row += size;
  }
}

void convert_split(const Split& s, int num_keys) {
  const int dim = s.kv.head_dim, block_size = s.kv.block_size;
  for (int key = 0; key < num_keys; key += 16) {
    const int at = s.begin + key, block = s.query.block_table[at / block_size], slot = at % block_size;
    const uint16_t* k = s.kv.keys(block, s.query.kv_head) + slot;
    const uint16_t* v = s.kv.values(block, s.query.kv_head) + static_cast<size_t>(slot) * static_cast<size_t>(dim);
    float* k32 = s.keys32 + static_cast<size_t>(key) * static_cast<size_t>(dim);
    float* v32 = s.values32 + static_cast<size_t>(key) * static_cast<size_t>(dim);
    for (int d = 0; d < dim; ++d, k += block_size, k32 += 16) {
      _mm256_store_ps(k32, load_half8(k));
      _mm256_store_ps(k32 + 8, load_half8(k + 8));
    }
    for (int i = 0; i < 16 * dim; i += 8) _mm256_store_ps(v32 + i, load_half8(v + i));
  }
}

}  // namespace

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

void attend_split(const KvView& kv, const SplitQuery& query, float* result, float* scratch) {
  const size_t dim = static_cast<size_t>(kv.head_dim);
  Split s{kv, query, query.split * kSplit, nullptr, scratch, nullptr, nullptr};
  s.keys32 = s.scores + kQueryGroup * kSplit;
  s.values32 = s.keys32 + kSplit * dim;
  s.qt = s.values32 + kSplit * dim;
  if (query.num_rows < kConvertRows) return attend_groups<false>(s, result);
  int high = 0;
  for (int r = 0; r < query.num_rows; ++r) high = query.limit[r] - s.begin > high ? query.limit[r] - s.begin : high;
  convert_split(s, high < kSplit ? high : kSplit);
  attend_groups<true>(s, result);
}

void merge_split(float* running, const float* part, int head_dim) {
  const float part_l = part[head_dim + 1];
  if (part_l == 0.0f || running[head_dim + 1] == 0.0f) return scalar::merge_split(running, part, head_dim);
  const float m = running[head_dim] > part[head_dim] ? running[head_dim] : part[head_dim];
  const float keep = scalar::exp_f32(running[head_dim] - m), add = scalar::exp_f32(part[head_dim] - m);
  const __m256 keep8 = _mm256_set1_ps(keep), add8 = _mm256_set1_ps(add);
  for (int d = 0; d < head_dim; d += 8) {
    const __m256 p = _mm256_mul_ps(_mm256_loadu_ps(part + d), add8);
    _mm256_storeu_ps(running + d, _mm256_fmadd_ps(_mm256_loadu_ps(running + d), keep8, p));
  }
  running[head_dim] = m;
  running[head_dim + 1] = __builtin_fmaf(running[head_dim + 1], keep, part_l * add);
}

}  // namespace firstlight::avx2
