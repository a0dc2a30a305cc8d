#include "runner.h"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <thread>
#include <utility>

#include "math_scalar.h"

namespace firstlight {
namespace {

constexpr int kPrivateRows = 2;    // up to this many rows every member prepares the input for itself
constexpr int kSplitTokens = 8;    // rows with at most this many tokens attend one split per unit,
constexpr int kSplitQueries = 96;  // or with at most this many query rows (tokens x heads per KV head)
constexpr int kWholeSplits = 3;    // splits per thread from which on a thread takes one with all its heads
constexpr int kTileQueries = 48;   // query rows in a tile that walks all splits,
constexpr int kLongTileQueries =
    96;  // or, where there are tiles enough for all threads, the most that stay in the L2 cache
constexpr int kLongRowTokens = 256;
constexpr int kRowBlockPack = 4;            // row blocks that a kernel may take at once
constexpr size_t kChunkBytes = 16 << 10;    // weight bytes worth taking a chunk for, when memory is the limit
constexpr int64_t kChunkMacs = 3'000'000;   // about 30 us of arithmetic, when arithmetic is
constexpr size_t kIdlePrefetch = 48 << 10;  // bytes of the next weight each member asks for while it waits
constexpr int kMaskWaitS = 30;              // far above what filling a mask may take
constexpr const char* kOpNames[] = {"embed", "norm", "linear",   "rope_kv", "attention",
                                    "gated", "add",  "soft_cap", "gather",  "sample"};

size_t floats(int n) { return static_cast<size_t>(n) * sizeof(float); }
int ceil_div(int a, int b) { return (a + b - 1) / b; }

// The largest id among the blocks that the step writes.
int highest_block(const Step& step, int block_size) {
  int32_t highest = 0;
  for (int r = 0; r < step.num_rows; ++r) {
    const StepRow& row = step.rows[r];
    const int last = (row.start + row.num_tokens - 1) / block_size;
    for (int i = row.start / block_size; i <= last; ++i) highest = std::max(highest, row.block_table[i]);
  }
  return highest;
}

}  // namespace

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

// One thread's scratch.
struct Runner::Member {
  PageBuffer acts, row, gemm, query, running, part, attention;
  std::vector<int32_t> first, limit;
  std::unique_ptr<SampleScratch> sampling;
};

Runner::Runner(const RunnerConfig& config) : config_(config), kernels_(find_kernels(config.kernels.c_str())) {
  kv_ = PageBuffer(kv_bytes_per_block() * static_cast<size_t>(config.num_blocks));
  const size_t layers = static_cast<size_t>(config.num_layers);
  kv_ahead_ = std::make_unique<PagesAhead>(kv_.data(), kv_.size() / layers, layers, kv_bytes_per_block() / layers);
}

Runner::~Runner() = default;

// ---------------------------------------------------------------- building

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
    op.first_counter = num_counters_;
    num_counters_ += 2;
    max_width = std::max(max_width, op.width);
    if (op.kind != OpKind::kLinear) continue;
    max_cols = std::max(max_cols, op.width);
    const int rows = buffers_[static_cast<size_t>(op.a)].is_sampled ? config_.max_samples : config_.max_tokens;
    shared = std::max(shared, act_total(op, rows));
    own = std::max(own, act_total(op, kPrivateRows));
  }
  counters_ = std::make_unique<Counter[]>(static_cast<size_t>(num_counters_));
  shared_acts_ = PageBuffer(shared);
  scratch_bytes_ += shared;

  const int heads = config_.num_heads / config_.num_kv_heads;
  const size_t queries = static_cast<size_t>(std::max({kLongTileQueries, kSplitQueries, kSplitTokens * heads}));
  const size_t result = queries * split_result_floats(config_.head_dim) * sizeof(float);
  for (int i = 0; i < std::max(1, config_.num_threads); ++i) {
    auto m = std::make_unique<Member>();
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
}

// ---------------------------------------------------------------- a step

void Runner::run(const Step& step) {
  for (int i = 0; i < num_counters_; ++i) counters_[static_cast<size_t>(i)].value.store(0, std::memory_order_relaxed);
  plan_attention(step);
  kv_ahead_->will_write(static_cast<size_t>(highest_block(step, config_.block_size)));
  if (is_tracing_) std::fill(std::begin(op_seconds_), std::end(op_seconds_), 0.0);
  mask_is_late_.store(false, std::memory_order_relaxed);
  team_->run([&](int member) { execute(member, step); });
  if (mask_is_late_.load(std::memory_order_relaxed)) {
    throw std::runtime_error("a mask was not ready " + std::to_string(kMaskWaitS) + " s after its logits");
  }
}

void Runner::barrier(int member, const Op* next) {
  if (next == nullptr || next->kind != OpKind::kLinear) return team_->barrier(member);
  const Weight& w = weights_[static_cast<size_t>(next->outputs[0].weight)];
  const size_t begin = std::min(static_cast<size_t>(member) * kIdlePrefetch, w.total_bytes());
  const char* p = reinterpret_cast<const char*>(w.data) + begin;
  const char* end = reinterpret_cast<const char*>(w.data) + std::min(begin + kIdlePrefetch, w.total_bytes());
  team_->barrier(member, [&] {
    for (int i = 0; i < 2 && p < end; ++i, p += 64) __builtin_prefetch(p, 0, 2);
  });
}

void Runner::execute(int member, const Step& step) {
  int64_t from = is_tracing_ && member == 0 ? monotonic_ns() : 0;
  for (size_t i = 0; i < ops_.size(); ++i) {
    const Op& op = ops_[i];
    if (op.kind != OpKind::kEmbed && op.kind != OpKind::kRopeKv && rows_of(op.a, step) == 0)
      continue;  // nothing to sample
    switch (op.kind) {
      case OpKind::kLinear:
        linear(op, step, member);
        break;
      case OpKind::kRopeKv:
        rope_kv(op, step, member);
        break;
      case OpKind::kAttention:
        attention(op, step, member);
        break;
      case OpKind::kSample:
        sample(step, member);
        break;
      default:
        rows_in_parallel(op, step, member);
    }
    if (i + 1 < ops_.size()) barrier(member, &ops_[i + 1]);
    if (is_tracing_ && member == 0) {
      const int64_t now = monotonic_ns();
      op_seconds_[static_cast<int>(op.kind)] += static_cast<double>(now - from) * 1e-9;
      from = now;
    }
  }
}

// Ops whose rows are independent and cheap: rows are taken a few at a time.
void Runner::rows_in_parallel(const Op& op, const Step& step, int member) {
  (void)member;
  const int rows = op.kind == OpKind::kGather ? step.num_samples : rows_of(op.a, step);
  constexpr int kChunk = 4;
  const auto row_of = [this](int buffer, int r) { return buffers_[static_cast<size_t>(buffer)].row(r); };
  for (int begin = take(op.first_counter, kChunk); begin < rows; begin = take(op.first_counter, kChunk)) {
    for (int r = begin; r < std::min(begin + kChunk, rows); ++r) {
      switch (op.kind) {
        case OpKind::kEmbed: {
          const Weight& w = weights_[static_cast<size_t>(op.weight)];
          float* out = row_of(op.a, r);
          scalar::dequantise_row(w, step.token_ids[r], out);
          if (op.scale != 1.0f) scalar::scale(out, op.scale, w.cols, out);
          break;
        }
        case OpKind::kNorm: {
          const float* weight = constants_[static_cast<size_t>(op.weight)].data();
          for (int i = 0; i < op.width; i += op.group) {
            kernels_->rms_norm(row_of(op.a, r) + i, weight, op.eps, op.group, row_of(op.b, r) + i);
          }
          break;
        }
        case OpKind::kGated:
          kernels_->gated(op.gated, row_of(op.a, r), row_of(op.b, r), op.width, row_of(op.c, r));
          break;
        case OpKind::kAdd:
          scalar::add(row_of(op.a, r), row_of(op.b, r), op.width, row_of(op.c, r));
          break;
        case OpKind::kSoftCap:
          kernels_->soft_cap(row_of(op.a, r), op.cap, op.width);
          break;
        case OpKind::kGather:
          std::memcpy(row_of(op.b, r), row_of(op.a, step.samples[r].token), floats(op.width));
          break;
        default:
          break;
      }
    }
  }
}

// ---------------------------------------------------------------- linear

// Forms of activations lie behind each other in ActKind order, skipping those no weight needs.
size_t Runner::act_offset(const Op& op, ActKind kind, int rows) const {
  size_t offset = 0;
  for (int k = 0; k < static_cast<int>(kind); ++k) {
    if (op.needs[k]) offset += act_bytes(static_cast<ActKind>(k), rows, op.width);
  }
  return offset;
}

size_t Runner::act_total(const Op& op, int rows) const {
  size_t total = 0;
  for (int k = 0; k < 3; ++k) {
    if (op.needs[k]) total += act_bytes(static_cast<ActKind>(k), rows, op.width);
  }
  return total;
}

void Runner::quantise_row(const Op& op, int row, int slot_rows, uint8_t* memory, Member& own) {
  const float* x = buffers_[static_cast<size_t>(op.a)].row(row);
  float* scratch = reinterpret_cast<float*>(own.row.data());
  if (op.input == InputKind::kNorm) {
    kernels_->rms_norm(x, constants_[static_cast<size_t>(op.b)].data(), op.eps, op.width, scratch);
    x = scratch;
  } else if (op.input == InputKind::kGated) {
    kernels_->gated(op.gated, x, buffers_[static_cast<size_t>(op.b)].row(row), op.width, scratch);
    x = scratch;
  }
  for (int k = 0; k < 3; ++k) {
    if (!op.needs[k]) continue;
    const auto kind = static_cast<ActKind>(k);
    kernels_->quantise(x, act_view(kind, slot_rows, op.width, memory + act_offset(op, kind, slot_rows)), row);
  }
}

void Runner::linear(const Op& op, const Step& step, int member) {
  Member& own = *members_[static_cast<size_t>(member)];
  const int rows = rows_of(op.a, step);
  uint8_t* memory = rows <= kPrivateRows ? own.acts.data() : shared_acts_.data();
  if (rows <= kPrivateRows) {
    for (int r = 0; r < rows; ++r) quantise_row(op, r, rows, memory, own);
  } else {
    const int chunk = std::max(1, std::min(8, rows / (4 * team_->active())));
    for (int begin = take(op.first_counter, chunk); begin < rows; begin = take(op.first_counter, chunk)) {
      for (int r = begin; r < std::min(begin + chunk, rows); ++r) quantise_row(op, r, rows, memory, own);
    }
    barrier(member, &op);
  }
  int total = 0;
  for (const auto& o : op.outputs) total += weights_[static_cast<size_t>(o.weight)].row_blocks();
  const Weight& first = weights_[static_cast<size_t>(op.outputs[0].weight)];
  const int by_bytes = static_cast<int>(kChunkBytes / first.row_block_bytes()) + 1;
  const int by_macs = static_cast<int>(kChunkMacs / (8ll * op.width * rows)) + 1;
  const int by_share = std::max(1, total / (6 * team_->active()));
  // Whole packs of the widest kernels, which are whole cache lines of output too.
  const int chunk = std::max(1, std::min({by_bytes * 4, by_macs, by_share}) / kRowBlockPack) * kRowBlockPack;
  for (int begin = take(op.first_counter + 1, chunk); begin < total; begin = take(op.first_counter + 1, chunk)) {
    int base = 0;
    for (const auto& o : op.outputs) {
      const Weight& w = weights_[static_cast<size_t>(o.weight)];
      const int from = std::max(begin - base, 0), to = std::min(begin + chunk - base, w.row_blocks());
      if (from < to) {
        const ActKind kind = act_kind(w);
        const Activations acts = act_view(kind, rows, op.width, memory + act_offset(op, kind, rows));
        const Buffer& out = buffers_[static_cast<size_t>(o.buffer)];
        const float* bias = o.bias >= 0 ? constants_[static_cast<size_t>(o.bias)].data() : nullptr;
        kernels_->gemm(w, acts, bias, o.accumulate, out.row(0), static_cast<size_t>(out.width), from, to,
                       own.gemm.data());
      }
      base += w.row_blocks();
    }
  }
}

// ---------------------------------------------------------------- attention

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
  (void)member;
  const RopeTable& table = tables_[static_cast<size_t>(op.table)];
  const size_t half = static_cast<size_t>(op.rotary_dim / 2);
  const KvView kv = kv_view(op.layer);
  constexpr int kChunk = 4;
  for (int begin = take(op.first_counter, kChunk); begin < step.num_tokens; begin = take(op.first_counter, kChunk)) {
    const int end = std::min(begin + kChunk, step.num_tokens);
    int r = 0;
    for (int t = begin; t < end; ++t) {
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
  for (int begin = take(op.first_counter, heads_at_once_); begin < total;
       begin = take(op.first_counter, heads_at_once_)) {
    for (int i = begin; i < begin + heads_at_once_; ++i) {
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
  const auto merge = [&](const float* part) {
    for (int i = 0; i < queries; ++i) {
      kernels_->merge_split(running + static_cast<size_t>(i) * result_floats,
                            part + static_cast<size_t>(i) * result_floats, dim);
    }
  };
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

// ---------------------------------------------------------------- sampling

void Runner::sample(const Step& step, int member) {
  Member& own = *members_[static_cast<size_t>(member)];
  const Op& op = ops_.back();
  const size_t vocab = static_cast<size_t>(config_.vocab_size);
  for (int i = take(op.first_counter, 1); i < step.num_samples; i = take(op.first_counter, 1)) {
    float* logits = buffers_[static_cast<size_t>(logits_)].row(i);
    if (step.logits_out) std::memcpy(step.logits_out + static_cast<size_t>(i) * vocab, logits, vocab * sizeof(float));
    const SampledPosition& s = step.samples[i];
    if (s.params->mask != nullptr && !await_mask(s)) continue;
    sample_row(logits, config_.vocab_size, *s.params, *s.result, *own.sampling);
  }
}

// A mask is nearly always there long before the logits are. Where it is not, whoever fills it needs a core: sleep.
bool Runner::await_mask(const SampledPosition& sample) {
  const auto is_ready = [&] { return __atomic_load_n(sample.mask_ready, __ATOMIC_ACQUIRE) != 0; };
  if (is_ready()) return true;
  const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(kMaskWaitS);
  while (!mask_is_late_.load(std::memory_order_relaxed)) {
    std::this_thread::sleep_for(std::chrono::microseconds(20));
    if (is_ready()) return true;
    if (std::chrono::steady_clock::now() > give_up) mask_is_late_.store(true, std::memory_order_relaxed);
  }
  return false;
}

// ---------------------------------------------------------------- KV blocks

size_t Runner::kv_bytes_per_block() const {
  return static_cast<size_t>(config_.num_layers) * 2 *
         static_cast<size_t>(config_.num_kv_heads * config_.head_dim * config_.block_size) * 2;
}

void Runner::copy_block(int source, int destination) {
  for (int layer = 0; layer < config_.num_layers; ++layer) {
    const KvView kv = kv_view(layer);
    std::memcpy(kv.keys(destination, 0), kv.keys(source, 0), kv.block_elements() * 2);
  }
}

void Runner::read_rows(int buffer, int count, float* out) const {
  const Buffer& from = buffers_[static_cast<size_t>(buffer)];
  std::memcpy(out, from.row(0), static_cast<size_t>(count) * static_cast<size_t>(from.width) * sizeof(float));
}

void Runner::read_block(int block, uint8_t* out) const {
  for (int layer = 0; layer < config_.num_layers; ++layer) {
    const KvView kv = kv_view(layer);
    std::memcpy(out + static_cast<size_t>(layer) * kv.block_elements() * 2, kv.keys(block, 0), kv.block_elements() * 2);
  }
}

void Runner::write_block(int block, const uint8_t* data) {
  for (int layer = 0; layer < config_.num_layers; ++layer) {
    const KvView kv = kv_view(layer);
    std::memcpy(kv.keys(block, 0), data + static_cast<size_t>(layer) * kv.block_elements() * 2,
                kv.block_elements() * 2);
  }
}

std::vector<std::pair<std::string, double>> Runner::op_times() const {
  std::vector<std::pair<std::string, double>> out;
  for (int i = 0; i < 10; ++i) out.emplace_back(kOpNames[i], op_seconds_[i]);
  return out;
}

}  // namespace firstlight
