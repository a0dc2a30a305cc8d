// Scalar attention: the oracle and the fallback. Reads like the definition in attention.h.
#include <cmath>
#include <limits>

#include "attention.h"
#include "math_scalar.h"

namespace firstlight::scalar {

void write_kv(const KvView& kv, int block, int slot, const float* k, const float* v) {
  for (int h = 0; h < kv.num_kv_heads; ++h) {
    uint16_t* keys = kv.keys(block, h) + slot;
    uint16_t* values = kv.values(block, h) + static_cast<size_t>(slot) * static_cast<size_t>(kv.head_dim);
    for (int d = 0; d < kv.head_dim; ++d) {
      keys[static_cast<size_t>(d) * static_cast<size_t>(kv.block_size)] = float_to_half(clamp_half(*k++));
      values[d] = float_to_half(clamp_half(*v++));
    }
  }
}

void attend_split(const KvView& kv, const SplitQuery& query, float* result, float* scratch) {
  const int begin = query.split * kSplit, dim = kv.head_dim;
  for (int r = 0; r < query.num_rows; ++r) {
    const float* q = query.q + static_cast<size_t>(r) * static_cast<size_t>(dim);
    float* o = result + static_cast<size_t>(r) * split_result_floats(dim);
    const int low = query.first[r] > begin ? query.first[r] : begin;
    const int high = query.limit[r] < begin + kSplit ? query.limit[r] : begin + kSplit;
    float max = -std::numeric_limits<float>::infinity();
    for (int key = low; key < high; ++key) {
      const uint16_t* k = kv.keys(query.block_table[key / kv.block_size], query.kv_head) + key % kv.block_size;
      float s = 0.0f;
      for (int d = 0; d < dim; ++d) s = std::fmaf(q[d], half_to_float(k[d * kv.block_size]), s);
      if (query.soft_cap > 0.0f) s = query.soft_cap * tanh_f32(s / query.soft_cap);
      scratch[key - begin] = s;
      max = s > max ? s : max;
    }
    float lanes[8] = {};
    for (int d = 0; d < dim; ++d) o[d] = 0.0f;
    for (int key = low; key < high; ++key) {
      const float p = exp_f32(scratch[key - begin] - max);
      lanes[key % 8] += p;
      const uint16_t* v =
          kv.values(query.block_table[key / kv.block_size], query.kv_head) + (key % kv.block_size) * dim;
      for (int d = 0; d < dim; ++d) o[d] = std::fmaf(p, half_to_float(v[d]), o[d]);
    }
    o[dim] = max;
    o[dim + 1] = lane_sum(lanes);
  }
}

namespace {

void merge_row(float* running, const float* part, int head_dim) {
  const float part_l = part[head_dim + 1];
  if (part_l == 0.0f) return;
  if (running[head_dim + 1] == 0.0f) {
    for (int i = 0; i < head_dim + 2; ++i) running[i] = part[i];
    return;
  }
  const float m = running[head_dim] > part[head_dim] ? running[head_dim] : part[head_dim];
  const float keep = exp_f32(running[head_dim] - m), add = exp_f32(part[head_dim] - m);
  for (int d = 0; d < head_dim; ++d) running[d] = std::fmaf(running[d], keep, part[d] * add);
  running[head_dim] = m;
  running[head_dim + 1] = std::fmaf(running[head_dim + 1], keep, part_l * add);
}

}  // namespace

void merge_split(float* running, const float* part, int num_rows, int head_dim) {
  const size_t stride = split_result_floats(head_dim);
  for (int r = 0; r < num_rows; ++r, running += stride, part += stride) merge_row(running, part, head_dim);
}

void finish(const float* running, int head_dim, float* out) {
  const float l = running[head_dim + 1];
  const float inv = l > 0.0f ? 1.0f / l : 0.0f;
  for (int d = 0; d < head_dim; ++d) out[d] = running[d] * inv + 0.0f;  // + 0 turns -0 into 0
}

}  // namespace firstlight::scalar
