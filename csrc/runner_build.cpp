// Setting a runner up: its memory, its program, what a step needs at most.
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "runner_parts.h"

namespace firstlight {

PageBuffer::PageBuffer(size_t bytes) : size_(bytes) {
  if (bytes == 0) return;
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) throw std::bad_alloc();
  if (bytes >= (2u << 20)) madvise(p, bytes, MADV_HUGEPAGE);
  data_ = static_cast<uint8_t*>(p);
}
PageBuffer::~PageBuffer() {
  if (data_) munmap(data_, size_);
}
PageBuffer::PageBuffer(PageBuffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
PageBuffer& PageBuffer::operator=(PageBuffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  return *this;
}

Runner::Runner(const RunnerConfig& config) : config_(config), kernels_(find_kernels(config.kernels.c_str())) {
  kv_ = PageBuffer(kv_bytes_per_block() * static_cast<size_t>(config.num_blocks));
  const size_t layers = static_cast<size_t>(config.num_layers);
  kv_ahead_ = std::make_unique<PagesAhead>(kv_.data(), kv_.size() / layers, layers, kv_bytes_per_block() / layers);
}

Runner::~Runner() = default;

int Runner::add_weight(LayoutKind kind, int rows, int cols, int group, bool has_min, bool scale_f32,
                       const uint8_t* data) {
  constexpr size_t kSlab = 32u << 20;
  Weight w{kind, rows, cols, group, has_min, scale_f32, nullptr};
  const size_t bytes = round64(w.total_bytes() + 4096);  // the kernels prefetch past the end
  if (weight_memory_.empty() || arena_used_ + bytes > weight_memory_.back().size()) {
    weight_memory_.emplace_back(std::max(bytes, kSlab));
    arena_used_ = 0;
  }
  uint8_t* at = weight_memory_.back().data() + arena_used_;
  arena_used_ += bytes;
  std::memcpy(at, data, w.total_bytes());
  w.data = at;
  weight_bytes_ += w.total_bytes();
  weights_.push_back(w);
  return static_cast<int>(weights_.size()) - 1;
}

int Runner::add_constant(const float* data, size_t count) {
  constants_.emplace_back(data, data + count);
  return static_cast<int>(constants_.size()) - 1;
}

int Runner::add_buffer(int width, bool is_sampled) {
  const int rows = is_sampled ? config_.max_samples : config_.max_tokens;
  Buffer b{width, is_sampled, PageBuffer(floats(width) * static_cast<size_t>(rows))};
  scratch_bytes_ += b.memory.size();
  buffers_.push_back(std::move(b));
  return static_cast<int>(buffers_.size()) - 1;
}

void Runner::add_embed(int out, int weight, float scale) {
  Op op{.kind = OpKind::kEmbed, .a = out, .weight = weight};
  op.scale = scale;
  ops_.push_back(op);
}

void Runner::add_norm(int x, int out, int weight, float eps, int group) {
  Op op{.kind = OpKind::kNorm, .a = x, .b = out, .weight = weight};
  op.eps = eps;
  op.group = group;
  op.width = buffers_[static_cast<size_t>(x)].width;
  ops_.push_back(op);
}

void Runner::add_linear(int x, InputKind input, int second, float eps, GatedKind gated,
                        const std::vector<LinearOutput>& outputs) {
  Op op{.kind = OpKind::kLinear, .a = x, .b = second};
  op.input = input;
  op.eps = eps;
  op.gated = gated;
  op.width = buffers_[static_cast<size_t>(x)].width;
  op.outputs = outputs;
  for (const auto& o : outputs) op.needs[static_cast<int>(act_kind(weights_[static_cast<size_t>(o.weight)]))] = true;
  ops_.push_back(op);
}

void Runner::add_rope_kv(int q, int k, int v, int layer, int inv_freq, int rotary_dim, bool interleaved,
                         float attn_factor) {
  Op op{.kind = OpKind::kRopeKv, .a = q, .b = k, .c = v, .weight = inv_freq, .layer = layer};
  op.rotary_dim = rotary_dim;
  op.interleaved = interleaved;
  for (size_t i = 0; i < tables_.size(); ++i) {
    const auto& t = tables_[i];
    if (t.constant == inv_freq && t.rotary_dim == rotary_dim && t.factor == attn_factor) op.table = static_cast<int>(i);
  }
  if (op.table < 0) {
    RopeTable t{inv_freq, rotary_dim, attn_factor, {}, {}};
    const size_t half = static_cast<size_t>(rotary_dim / 2), count = half * static_cast<size_t>(config_.max_position);
    t.cos.resize(count);
    t.sin.resize(count);
    for (size_t p = 0; p < static_cast<size_t>(config_.max_position); ++p) {
      for (size_t i = 0; i < half; ++i) {
        // The angle is formed in float32, as the models were trained with.
        const float angle = static_cast<float>(p) * constants_[static_cast<size_t>(inv_freq)][i];
        t.cos[p * half + i] = static_cast<float>(std::cos(static_cast<double>(angle))) * attn_factor;
        t.sin[p * half + i] = static_cast<float>(std::sin(static_cast<double>(angle))) * attn_factor;
      }
    }
    scratch_bytes_ += 2 * count * sizeof(float);
    op.table = static_cast<int>(tables_.size());
    tables_.push_back(std::move(t));
  }
  ops_.push_back(op);
}

void Runner::add_attention(int q, int out, int layer, float scale, int window, float soft_cap) {
  Op op{.kind = OpKind::kAttention, .a = q, .b = out, .layer = layer};
  op.scale = scale;
  op.window = window;
  op.cap = soft_cap;
  ops_.push_back(op);
}

void Runner::add_gated(GatedKind kind, int gate, int up, int out) {
  Op op{.kind = OpKind::kGated, .a = gate, .b = up, .c = out};
  op.gated = kind;
  op.width = buffers_[static_cast<size_t>(out)].width;
  ops_.push_back(op);
}

void Runner::add_add(int x, int y, int out) {
  Op op{.kind = OpKind::kAdd, .a = x, .b = y, .c = out};
  op.width = buffers_[static_cast<size_t>(out)].width;
  ops_.push_back(op);
}

void Runner::add_soft_cap(int x, float cap) {
  Op op{.kind = OpKind::kSoftCap, .a = x, .b = x};
  op.cap = cap;
  op.width = buffers_[static_cast<size_t>(x)].width;
  ops_.push_back(op);
}

void Runner::add_gather(int x, int out) {
  Op op{.kind = OpKind::kGather, .a = x, .b = out};
  op.width = buffers_[static_cast<size_t>(out)].width;
  ops_.push_back(op);
}

void Runner::finish(int logits) {
  logits_ = logits;
  ops_.push_back(Op{.kind = OpKind::kSample, .a = logits});
  int max_width = 0, max_cols = 0;
  size_t shared = 0, own = 0;
  for (auto& op : ops_) {
    max_width = std::max(max_width, op.width);
    if (op.kind != OpKind::kLinear) continue;
    max_cols = std::max(max_cols, op.width);
    const int rows = buffers_[static_cast<size_t>(op.a)].is_sampled ? config_.max_samples : config_.max_tokens;
    shared = std::max(shared, act_total(op, rows));
    own = std::max(own, act_total(op, kPrivateRows));
  }
  shared_acts_ = PageBuffer(shared);
  scratch_bytes_ += shared;

  const int heads = config_.num_heads / config_.num_kv_heads;
  const size_t queries = static_cast<size_t>(std::max({kLongTileQueries, kSplitQueries, kSplitTokens * heads}));
  const size_t result = queries * split_result_floats(config_.head_dim) * sizeof(float);
  for (int i = 0; i < std::max(1, config_.num_threads); ++i) {
    auto m = std::make_unique<Member>();
    m->index = i;
    m->acts = PageBuffer(own);
    m->row = PageBuffer(floats(max_width));
    m->gemm = PageBuffer(gemm_scratch_bytes(max_cols));
    m->query = PageBuffer(queries * floats(config_.head_dim));
    m->running = PageBuffer(result);
    m->part = PageBuffer(result);
    m->attention = PageBuffer(attention_scratch_floats(config_.head_dim) * sizeof(float));
    m->first.resize(queries);
    m->limit.resize(queries);
    m->sampling = std::make_unique<SampleScratch>(config_.vocab_size);
    members_.push_back(std::move(m));
  }
  splits_left_ = std::make_unique<std::atomic<int>[]>(static_cast<size_t>(config_.max_tokens) *
                                                      static_cast<size_t>(config_.num_kv_heads));
  team_ = std::make_unique<ThreadTeam>(config_.num_threads);
  counters_ = std::make_unique<Counter[]>(static_cast<size_t>(kCounterSets * team_->size()));
}

}  // namespace firstlight
