// Attention of a few query rows over one split of the paged KV cache, and the merge of splits.
//
// Keys are walked in splits at fixed absolute positions (split i covers keys [i * kSplit, (i + 1) * kSplit)). For each
// query row and split, in every kernel set and for every grouping of rows:
//   score_k = sum over d ascending of fma(q_d, k_d, .) from 0, then the soft cap when there is one
//   m = max of the visible scores; p_k = exp(score_k - m), exactly 0 for keys that are not visible
//   l = sum of p in 8 lanes (lane i takes keys i, i + 8, ...), then the lane order of ops.h
//   o_d = sum over k ascending of fma(p_k, v_kd, .) from 0
// Splits are merged in ascending order by merge_split; splits with no visible key are skipped. So a row's result
// depends on its own keys alone: not on which rows share the call, on chunking, or on threads.
#pragma once

#include <cstddef>
#include <cstdint>

namespace firstlight {

constexpr int kSplit = 128;     // keys per split
constexpr int kQueryGroup = 6;  // query rows that one inner loop covers

// One layer's KV blocks, float16. Block b holds keys [kv_head][head_dim][block_size] and then values
// [kv_head][block_size][head_dim]. block_size is a multiple of 16, head_dim of 16.
struct KvView {
  uint16_t* base = nullptr;
  int num_kv_heads = 0;
  int head_dim = 0;
  int block_size = 0;

  size_t head_elements() const { return static_cast<size_t>(head_dim) * static_cast<size_t>(block_size); }
  size_t block_elements() const { return 2 * static_cast<size_t>(num_kv_heads) * head_elements(); }
  uint16_t* keys(int block, int head) const {
    return base + static_cast<size_t>(block) * block_elements() + static_cast<size_t>(head) * head_elements();
  }
  uint16_t* values(int block, int head) const {
    return keys(block, head) + static_cast<size_t>(num_kv_heads) * head_elements();
  }
};

// What one call computes. Row r sees keys [first[r], limit[r]); only those inside the split count.
struct SplitQuery {
  const float* q = nullptr;  // [num_rows, head_dim], already multiplied by the softmax scale
  const int32_t* first = nullptr;
  const int32_t* limit = nullptr;
  int num_rows = 0;
  const int32_t* block_table = nullptr;
  int kv_head = 0;
  int split = 0;
  float soft_cap = 0.0f;
};

// Floats per row of a split's result: o[head_dim], m, l.
inline size_t split_result_floats(int head_dim) { return static_cast<size_t>(head_dim) + 2; }
inline size_t attention_scratch_floats(int head_dim) {
  return static_cast<size_t>(head_dim) * 2 * kSplit + kQueryGroup * kSplit + 64;
}

// Writes one token's key and value into its slot; values are clamped to finite float16.
using KvWriteFn = void (*)(const KvView& kv, int block, int slot, const float* k, const float* v);
// result is [num_rows, head_dim + 2]; scratch is 64-byte aligned, attention_scratch_floats long, private to the caller.
using AttendFn = void (*)(const KvView& kv, const SplitQuery& query, float* result, float* scratch);
// Folds the next split of num_rows rows into a running result of the same form (running starts with l = 0).
using MergeFn = void (*)(float* running, const float* part, int num_rows, int head_dim);

namespace scalar {
void write_kv(const KvView& kv, int block, int slot, const float* k, const float* v);
void attend_split(const KvView& kv, const SplitQuery& query, float* result, float* scratch);
void merge_split(float* running, const float* part, int num_rows, int head_dim);
// out[d] = o[d] / l; a row that saw no key gives 0.
void finish(const float* running, int head_dim, float* out);
}  // namespace scalar
namespace avx2 {
void write_kv(const KvView& kv, int block, int slot, const float* k, const float* v);
void attend_split(const KvView& kv, const SplitQuery& query, float* result, float* scratch);
void merge_split(float* running, const float* part, int num_rows, int head_dim);
}  // namespace avx2
namespace avx512 {
void attend_split(const KvView& kv, const SplitQuery& query, float* result, float* scratch);
void merge_split(float* running, const float* part, int num_rows, int head_dim);
}  // namespace avx512

}  // namespace firstlight
