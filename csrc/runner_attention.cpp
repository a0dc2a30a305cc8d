// Rotary embedding, KV writes and attention of a step.
#include <algorithm>
#include <numeric>

#include "math_scalar.h"
#include "runner_parts.h"

namespace firstlight {
namespace {

constexpr int kWholeSplits = 3;  // splits per thread from which on a thread takes one with all its heads
constexpr int kLongRowTokens = 256;
constexpr int kFewTokens = 4;  // tokens per row, on average, up to which a thread takes one at a time

int ceil_div(int a, int b) { return (a + b - 1) / b; }

}  // namespace

KvView Runner::kv_view(int layer) const {
  KvView v;
  v.num_kv_heads = config_.num_kv_heads;
  v.head_dim = config_.head_dim;
  v.block_size = config_.block_size;
  v.base = reinterpret_cast<uint16_t*>(kv_.data()) +
           static_cast<size_t>(layer) * v.block_elements() * static_cast<size_t>(config_.num_blocks);
  return v;
}

void Runner::rope_kv(const Op& op, const Step& step, int member) {
  Member& own = *members_[static_cast<size_t>(member)];
  const RopeTable& table = tables_[static_cast<size_t>(op.table)];
  const size_t half = static_cast<size_t>(op.rotary_dim / 2);
  const KvView kv = kv_view(op.layer);
  // Keys lie with the slots of a block side by side: two threads that fill one block take its lines from each other.
  const int chunk = step.num_tokens > kFewTokens * step.num_rows ? config_.block_size : 1;
  for (Share share; take(own, step.num_tokens, chunk, &share);) {
    int r = 0;
    for (int t = share.begin; t < share.end; ++t) {
      while (t >= step.rows[r].first_token + step.rows[r].num_tokens) ++r;
      const int position = step.positions[t];
      const float* cos = table.cos.data() + static_cast<size_t>(position) * half;
      const float* sin = table.sin.data() + static_cast<size_t>(position) * half;
      float* k = buffers_[static_cast<size_t>(op.b)].row(t);
      kernels_->rope(buffers_[static_cast<size_t>(op.a)].row(t), config_.num_heads, config_.head_dim, op.rotary_dim,
                     op.interleaved, cos, sin);
      kernels_->rope(k, config_.num_kv_heads, config_.head_dim, op.rotary_dim, op.interleaved, cos, sin);
      kernels_->write_kv(kv, step.rows[r].block_table[position / config_.block_size], position % config_.block_size, k,
                         buffers_[static_cast<size_t>(op.c)].row(t));
    }
  }
}

// Cuts the step's attention into units, the same for every layer: rows with few tokens (decode, small chunks) give a
// unit per split, so that all threads share one long context; long chunks give a unit per tile of tokens, largest
// context first. Rows with most tokens come first: whoever is left waiting at the end waits for a small unit.
void Runner::plan_attention(const Step& step) {
  units_.clear();
  unit_group_.clear();
  unit_result_.clear();
  merge_left_.clear();
  row_order_.resize(static_cast<size_t>(step.num_rows));
  std::iota(row_order_.begin(), row_order_.end(), 0);
  std::sort(row_order_.begin(), row_order_.end(), [&](int a, int b) {
    const int more = step.rows[a].num_tokens - step.rows[b].num_tokens;
    return more != 0 ? more > 0 : a < b;
  });
  const int heads = config_.num_heads / config_.num_kv_heads;
  const size_t row_floats = split_result_floats(config_.head_dim);
  size_t partial_floats = 0;
  for (const int r : row_order_) {
    const StepRow& row = step.rows[r];
    if (row.num_tokens <= kSplitTokens || row.num_tokens * heads <= kSplitQueries) {
      const int splits = ceil_div(row.start + row.num_tokens, kSplit);
      for (int s = 0; s < splits; ++s) {
        units_.push_back({r, 0, row.num_tokens, s});
        unit_group_.push_back(static_cast<int>(merge_left_.size()));
        unit_result_.push_back(partial_floats);
        partial_floats += static_cast<size_t>(row.num_tokens * heads * config_.num_kv_heads) * row_floats;
      }
      merge_left_.push_back(splits);
    } else {
      const int tile = std::max(1, (row.num_tokens >= kLongRowTokens ? kLongTileQueries : kTileQueries) / heads);
      for (int first = (row.num_tokens - 1) / tile * tile; first >= 0; first -= tile) {
        units_.push_back({r, first, std::min(tile, row.num_tokens - first), -1});
        unit_group_.push_back(-1);
        unit_result_.push_back(0);
      }
    }
  }
  // A split's heads lie side by side in its blocks: one thread reads all of them faster than two that share a block.
  const bool is_decode = merge_left_.size() == static_cast<size_t>(step.num_rows);
  heads_at_once_ =
      is_decode && units_.size() >= static_cast<size_t>(kWholeSplits * config_.num_threads) ? config_.num_kv_heads : 1;
  if (partial_floats * sizeof(float) > partials_.size()) partials_ = PageBuffer(partial_floats * sizeof(float) * 3 / 2);
  for (size_t g = 0; g < merge_left_.size(); ++g) {
    for (int h = 0; h < config_.num_kv_heads; ++h) {
      splits_left_[g * static_cast<size_t>(config_.num_kv_heads) + static_cast<size_t>(h)].store(
          merge_left_[g], std::memory_order_relaxed);
    }
  }
}

void Runner::attention(const Op& op, const Step& step, int member) {
  Member& own = *members_[static_cast<size_t>(member)];
  const int heads = config_.num_kv_heads, total = static_cast<int>(units_.size()) * heads;
  for (Share share; take_next(own, total, heads_at_once_, &share);) {
    for (int i = share.begin; i < share.end; ++i) {
      attend_unit(op, step, units_[static_cast<size_t>(i / heads)], i / heads, i % heads, own);
    }
  }
}

void Runner::attend_unit(const Op& op, const Step& step, const AttentionUnit& unit, int unit_index, int kv_head,
                         Member& own) {
  const StepRow& row = step.rows[unit.row];
  const int dim = config_.head_dim, heads = config_.num_heads / config_.num_kv_heads, queries = unit.count * heads;
  const size_t result_floats = split_result_floats(dim);
  float* q = reinterpret_cast<float*>(own.query.data());
  const Buffer& q_buffer = buffers_[static_cast<size_t>(op.a)];
  for (int t = 0; t < unit.count; ++t) {
    const int position = row.start + unit.first + t;
    const float* source = q_buffer.row(row.first_token + unit.first + t) + kv_head * heads * dim;
    scalar::scale(source, op.scale, heads * dim, q + t * heads * dim);
    for (int h = 0; h < heads; ++h) {
      own.limit[static_cast<size_t>(t * heads + h)] = position + 1;
      own.first[static_cast<size_t>(t * heads + h)] = op.window > 0 ? std::max(0, position + 1 - op.window) : 0;
    }
  }
  SplitQuery query;
  query.q = q;
  query.first = own.first.data();
  query.limit = own.limit.data();
  query.num_rows = queries;
  query.block_table = row.block_table;
  query.kv_head = kv_head;
  query.soft_cap = op.cap;
  const KvView kv = kv_view(op.layer);
  float* scratch = reinterpret_cast<float*>(own.attention.data());
  float* running = reinterpret_cast<float*>(own.running.data());
  const auto clear_running = [&] {
    for (int i = 0; i < queries; ++i)
      running[static_cast<size_t>(i) * result_floats + static_cast<size_t>(dim) + 1] = 0.0f;
  };
  const auto merge = [&](const float* part) { kernels_->merge_split(running, part, queries, dim); };
  if (unit.split < 0) {
    float* part = reinterpret_cast<float*>(own.part.data());
    clear_running();
    const int last = (row.start + unit.first + unit.count - 1) / kSplit;
    for (query.split = own.first[0] / kSplit; query.split <= last; ++query.split) {
      kernels_->attend_split(kv, query, part, scratch);
      merge(part);
    }
  } else {
    // Whoever finishes a tile's last split merges all of them, in ascending order.
    const size_t head_floats = static_cast<size_t>(queries) * result_floats;
    float* partials = reinterpret_cast<float*>(partials_.data());
    const auto part_at = [&](int index) {
      return partials + unit_result_[static_cast<size_t>(index)] + static_cast<size_t>(kv_head) * head_floats;
    };
    query.split = unit.split;
    kernels_->attend_split(kv, query, part_at(unit_index), scratch);
    const int group = unit_group_[static_cast<size_t>(unit_index)], splits = merge_left_[static_cast<size_t>(group)];
    std::atomic<int>& left = splits_left_[static_cast<size_t>(group * config_.num_kv_heads + kv_head)];
    if (left.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
    left.store(splits, std::memory_order_relaxed);  // ready for the next layer
    clear_running();
    for (int s = 0; s < splits; ++s) merge(part_at(unit_index - unit.split + s));
  }
  const Buffer& out = buffers_[static_cast<size_t>(op.b)];
  for (int i = 0; i < queries; ++i) {
    const int token = row.first_token + unit.first + i / heads, head = kv_head * heads + i % heads;
    scalar::finish(running + static_cast<size_t>(i) * result_floats, dim, out.row(token) + head * dim);
  }
}

}  // namespace firstlight
