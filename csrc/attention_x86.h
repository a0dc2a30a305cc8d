// Attention over paged float16 KV on x86 vectors, compiled once per kernel set in the namespace that
// FIRSTLIGHT_ATTENTION_SET names. Keys lie dimension-major inside a block, so lanes are keys and no score needs a
// horizontal sum; values lie token-major, so lanes are dimensions. Many query rows share one conversion of the split.
#pragma once

#include <cstring>

#include "attention.h"
#include "vector_x86.h"

namespace firstlight::FIRSTLIGHT_ATTENTION_SET {
namespace {

constexpr int kConvertRows = 12;              // from this many query rows on, converting the split once pays
constexpr int kChunk = 16;                    // keys that lie in one block
constexpr int kChunks = kLanes == 8 ? 1 : 2;  // chunks scored at once: enough sums to hide a multiply-add's latency
constexpr int kMostVectors = kLanes == 8 ? 2 : 4;  // of dimensions, for many rows at once: what fits the registers

// Memory to ask for while a chunk is scored, two lines for every two dimensions: blocks lie scattered, which the
// processor's own prefetcher cannot follow. Null pointers ask for nothing.
struct Ahead {
  const char* keys = nullptr;
  const char* values = nullptr;
};

template <typename T>
struct Chunk {
  const T* keys;  // [head_dim] steps of a stride
  Ahead ahead;
};

// Scores of R rows against the keys of C chunks; q is [R][head_dim].
template <int R, int C, bool PREFETCH, typename T>
inline void score(const Chunk<T>* chunks, size_t stride, const float* q, int dim, float* s) {
  constexpr int kPer = kChunk / kLanes, N = C * kPer;
  Floats acc[R * N];
#pragma GCC unroll 16
  for (int i = 0; i < R * N; ++i) acc[i] = zeros();
  size_t offset = 0;
  for (int d = 0; d < dim; d += 2) {
    if constexpr (PREFETCH) {
#pragma GCC unroll 2
      for (int c = 0; c < C; ++c) {
        _mm_prefetch(chunks[c].ahead.keys + 32 * d, _MM_HINT_T0);
        _mm_prefetch(chunks[c].ahead.values + 32 * d, _MM_HINT_T0);
      }
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i, offset += stride) {
      Floats k[N];
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) k[n] = load(chunks[n / kPer].keys + offset + n % kPer * kLanes);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const Floats x = all(q[r * dim + d + i]);
#pragma GCC unroll 4
        for (int n = 0; n < N; ++n) acc[r * N + n] = fmadd(x, k[n], acc[r * N + n]);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int n = 0; n < N; ++n) store(s + r * kSplit + n * kLanes, acc[r * N + n]);
  }
}

// o += p * v over `keys` keys of one block (or of the converted split) for R rows and N vectors of dimensions.
template <int R, int N, typename T>
inline void weigh(const T* v, int keys, size_t stride, const float* p, float* o, size_t o_stride) {
  Floats acc[R * N];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) acc[r * N + n] = load(o + static_cast<size_t>(r) * o_stride + n * kLanes);
  }
  for (int key = 0; key < keys; ++key, v += stride) {
    Floats x[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) x[n] = load(v + n * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const Floats w = all(p[r * kSplit + key]);
#pragma GCC unroll 8
      for (int n = 0; n < N; ++n) acc[r * N + n] = fmadd(w, x[n], acc[r * N + n]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
    for (int n = 0; n < N; ++n) store(o + static_cast<size_t>(r) * o_stride + n * kLanes, acc[r * N + n]);
  }
}

template <int R, typename T>
inline void weigh_all(const T* v, int keys, int dim, const float* p, float* o, size_t o_stride) {
  constexpr int N = R <= 1 ? 8 : R <= 3 ? 4 : kMostVectors;
  const size_t stride = static_cast<size_t>(dim);
  int d = 0;
  for (; d + N * kLanes <= dim; d += N * kLanes) weigh<R, N>(v + d, keys, stride, p, o + d, o_stride);
  for (; d < dim; d += kLanes) weigh<R, 1>(v + d, keys, stride, p, o + d, o_stride);
}

// Masks one row's scores of `num` keys (a multiple of 16) in place. Returns the largest visible one.
inline float mask_row(float* s, int num, int low, int high, float soft_cap) {
  const Floats lowest = all(-__builtin_inff());
  Floats most = lowest;
  for (int i = 0; i < num; i += kLanes) {
    Floats v = load(s + i);
    if (soft_cap > 0.0f) v = mul(all(soft_cap), tanh_all(div(v, all(soft_cap))));
    if (i < low || i + kLanes > high) v = select(between(i, low, high), v, lowest);
    if (soft_cap > 0.0f || i < low || i + kLanes > high) store(s + i, v);
    most = max(v, most);
  }
  return lane_max8(max_in_eight(most));
}

// Turns masked scores of R rows into weights in place: exp(s - m). The rows go side by side, so that one's long chain
// of operations is hidden behind the others'. l[r] is the sum of a row's weights.
template <int R>
inline void weights_of(float* s, int num, const float* m, float* l) {
  __m256 sum[R];
  repeat<R>([&]<int I>() __attribute__((always_inline)) { sum[I] = _mm256_setzero_ps(); });
  for (int i = 0; i < num; i += kLanes, s += kLanes) {
    repeat<R>([&]<int I>() __attribute__((always_inline)) {
      const Floats p = exp_of_negative(sub(load(s + I * kSplit), all(m[I])));
      store(s + I * kSplit, p);
      sum[I] = add_in_eight(sum[I], p);
    });
  }
  repeat<R>([&]<int I>() __attribute__((always_inline)) { l[I] = lane_sum8(sum[I]); });
}

struct Split {
  const KvView& kv;
  const SplitQuery& query;
  int begin;
  float* scores;
  float* keys32;    // [chunk][head_dim][16] when converted
  float* values32;  // [key][head_dim]
};

// What to ask for while the chunk at `key` of the split is scored: the keys two chunks on, and this chunk's values,
// which are read once all scores are there. Past the split's end it repeats what is at hand.
inline Ahead ahead_of(const Split& s, int key, int num) {
  const auto at = [&](int k) { return s.begin + (k < num ? k : key); };
  const auto block = [&](int k) { return s.query.block_table[at(k) / s.kv.block_size]; };
  const int next = key + 2 * kChunk;
  const uint16_t* keys = s.kv.keys(block(next), s.query.kv_head) + at(next) % s.kv.block_size * s.kv.head_dim;
  const uint16_t* values = s.kv.values(block(key), s.query.kv_head) + at(key) % s.kv.block_size * s.kv.head_dim;
  return {reinterpret_cast<const char*>(keys), reinterpret_cast<const char*>(values)};
}

template <int R, int C, bool CONVERTED>
inline void score_chunks(const Split& s, const float* q, int key, int num) {
  const int dim = s.kv.head_dim, block_size = s.kv.block_size;
  if constexpr (CONVERTED) {
    Chunk<float> chunks[C];
    for (int c = 0; c < C; ++c) {
      chunks[c] = {s.keys32 + static_cast<size_t>(key + c * kChunk) * static_cast<size_t>(dim), Ahead{}};
    }
    score<R, C, false>(chunks, kChunk, q, dim, s.scores + key);
  } else {
    Chunk<uint16_t> chunks[C];
    for (int c = 0; c < C; ++c) {
      const int at = s.begin + key + c * kChunk;
      chunks[c] = {s.kv.keys(s.query.block_table[at / block_size], s.query.kv_head) + at % block_size,
                   ahead_of(s, key + c * kChunk, num)};
    }
    score<R, C, true>(chunks, static_cast<size_t>(block_size), q, dim, s.scores + key);
  }
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
    float* o = result + static_cast<size_t>(row + r) * out_stride;
    for (int d = 0; d < dim; ++d) o[d] = 0.0f;
  }
  high = high < kSplit ? high : kSplit;
  low = low > 0 ? low / kChunk * kChunk : 0;
  const int num = (high + kChunk - 1) / kChunk * kChunk;
  float* o = result + static_cast<size_t>(row) * out_stride;
  if (low >= high) {  // no row of the group sees a key here
    for (int r = 0; r < R; ++r) {
      o[static_cast<size_t>(r) * out_stride + static_cast<size_t>(dim)] = -__builtin_inff();
      o[static_cast<size_t>(r) * out_stride + static_cast<size_t>(dim) + 1] = 0.0f;
    }
    return;
  }
  for (int key = 0; key < low; key += kLanes) {
    for (int r = 0; r < R; ++r) store(s.scores + r * kSplit + key, zeros());
  }
  const float* q = s.query.q + static_cast<size_t>(row) * static_cast<size_t>(dim);
  int key = low;
  for (; key + kChunks * kChunk <= num; key += kChunks * kChunk) score_chunks<R, kChunks, CONVERTED>(s, q, key, num);
  for (; key < num; key += kChunk) score_chunks<R, 1, CONVERTED>(s, q, key, num);
  float m[R], l[R];
  for (int r = 0; r < R; ++r) {
    m[r] = mask_row(s.scores + r * kSplit, num, s.query.first[row + r] - s.begin, s.query.limit[row + r] - s.begin,
                    s.query.soft_cap);
  }
  weights_of<R>(s.scores, num, m, l);
  for (int r = 0; r < R; ++r) {
    float* tail = o + static_cast<size_t>(r) * out_stride + static_cast<size_t>(dim);
    tail[0] = m[r];
    tail[1] = l[r];
  }
  // Keys before `low` have weight 0 and are skipped: adding 0 * v changes nothing.
  if constexpr (CONVERTED) {
    weigh_all<R>(s.values32 + static_cast<size_t>(low) * static_cast<size_t>(dim), high - low, dim, s.scores + low, o,
                 out_stride);
  } else {
    for (key = low; key < high;) {
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

// While one chunk is converted the next one is asked for: blocks lie scattered.
void convert_split(const Split& s, int num_keys) {
  const int dim = s.kv.head_dim, block_size = s.kv.block_size;
  const auto keys_at = [&](int at) {
    return s.kv.keys(s.query.block_table[at / block_size], s.query.kv_head) + at % block_size;
  };
  const auto values_at = [&](int at) {
    return s.kv.values(s.query.block_table[at / block_size], s.query.kv_head) +
           static_cast<size_t>(at % block_size) * static_cast<size_t>(dim);
  };
  for (int key = 0; key < num_keys; key += kChunk) {
    const int at = s.begin + key, next = key + kChunk < num_keys ? at + kChunk : at;
    const uint16_t *k = keys_at(at), *v = values_at(at), *next_k = keys_at(next), *next_v = values_at(next);
    float* k32 = s.keys32 + static_cast<size_t>(key) * static_cast<size_t>(dim);
    float* v32 = s.values32 + static_cast<size_t>(key) * static_cast<size_t>(dim);
    for (int d = 0; d < dim; ++d, k += block_size, next_k += block_size, k32 += kChunk) {
      _mm_prefetch(reinterpret_cast<const char*>(next_k), _MM_HINT_T0);
      for (int i = 0; i < kChunk; i += kLanes) store(k32 + i, load(k + i));
    }
    for (int i = 0; i < kChunk * dim; i += 32) {  // a line
      _mm_prefetch(reinterpret_cast<const char*>(next_v + i), _MM_HINT_T0);
      for (int n = 0; n < 32; n += kLanes) store(v32 + i + n, load(v + i + n));
    }
  }
}

}  // namespace

void attend_split(const KvView& kv, const SplitQuery& query, float* result, float* scratch) {
  const size_t dim = static_cast<size_t>(kv.head_dim);
  Split s{kv, query, query.split * kSplit, scratch, nullptr, nullptr};
  s.keys32 = s.scores + kQueryGroup * kSplit;
  s.values32 = s.keys32 + kSplit * dim;
  if (query.num_rows < kConvertRows) return attend_groups<false>(s, result);
  int high = 0;
  for (int r = 0; r < query.num_rows; ++r) high = query.limit[r] - s.begin > high ? query.limit[r] - s.begin : high;
  convert_split(s, high < kSplit ? high : kSplit);
  attend_groups<true>(s, result);
}

// The factors of many rows at once, then row by row.
void merge_split(float* running, const float* part, int num_rows, int head_dim) {
  const size_t stride = split_result_floats(head_dim), at_m = static_cast<size_t>(head_dim), at_l = at_m + 1;
  for (int begin = 0; begin < num_rows; begin += kLanes, running += kLanes * stride, part += kLanes * stride) {
    const size_t rows = static_cast<size_t>(num_rows - begin < kLanes ? num_rows - begin : kLanes);
    alignas(64) float m[kLanes] = {}, part_m[kLanes] = {}, keep[kLanes], add[kLanes];
    for (size_t r = 0; r < rows; ++r) {
      m[r] = running[r * stride + at_m];
      part_m[r] = part[r * stride + at_m];
    }
    const Floats most = max(load(m), load(part_m));
    store(keep, exp_all(sub(load(m), most)));
    store(add, exp_all(sub(load(part_m), most)));
    store(m, most);
    for (size_t r = 0; r < rows; ++r) {
      float* into = running + r * stride;
      const float* from = part + r * stride;
      if (from[at_l] == 0.0f) continue;
      if (into[at_l] == 0.0f) {
        std::memcpy(into, from, stride * sizeof(float));
        continue;
      }
      const Floats keep_all = all(keep[r]), add_all = all(add[r]);
      for (size_t d = 0; d < at_m; d += kLanes) {
        store(into + d, fmadd(load(into + d), keep_all, mul(load(from + d), add_all)));
      }
      into[at_m] = m[r];
      into[at_l] = __builtin_fmaf(into[at_l], keep[r], from[at_l] * add[r]);
    }
  }
}

}  // namespace firstlight::FIRSTLIGHT_ATTENTION_SET
