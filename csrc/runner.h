// Runs a lowered decoder program over a ragged batch: persistent threads, one barrier between phases, no heap in a
// step.
//
// Knows ops, buffers, weights and KV blocks; not requests, text or scheduling. Python builds it once (add_*, finish)
// and then calls run() per step with the GIL released. Every argument of run() is checked by the caller (bindings.cpp).
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels.h"
#include "pages_ahead.h"
#include "sampling.h"
#include "thread_team.h"
#include "weight.h"

namespace firstlight {

// Memory from the kernel in 2 MiB pages where it offers them. Zeroed.
class PageBuffer {
 public:
  PageBuffer() = default;
  explicit PageBuffer(size_t bytes);
  ~PageBuffer();
  PageBuffer(PageBuffer&& other) noexcept;
  PageBuffer& operator=(PageBuffer&& other) noexcept;
  uint8_t* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  uint8_t* data_ = nullptr;
  size_t size_ = 0;
};

struct RunnerConfig {
  int num_threads = 1;
  int max_tokens = 1;   // tokens in one step
  int max_samples = 1;  // sampled positions in one step
  int block_size = 16;
  int num_blocks = 1;
  int num_layers = 1;
  int num_heads = 1;
  int num_kv_heads = 1;
  int head_dim = 16;
  int max_position = 1;
  int vocab_size = 1;
  std::string kernels = "auto";
};

// One request's share of a step. Token offsets count from the step's first token.
struct StepRow {
  int first_token;
  int num_tokens;
  int start;                   // absolute position of the first token
  const int32_t* block_table;  // covers [0, start + num_tokens)
};

struct SampledPosition {
  int token;  // index of the token after which to sample
  const SampleParams* params;
  SampleResult* result;
  const int32_t* mask_ready;  // where params->mask is set: another thread fills the mask, then stores 1 here
};

struct Step {
  const int32_t* token_ids;  // [num_tokens]
  const int32_t* positions;  // [num_tokens]
  int num_tokens;
  const StepRow* rows;
  int num_rows;
  const SampledPosition* samples;  // ascending by token
  int num_samples;
  float* logits_out;  // [num_samples, vocab] or nullptr
};

// What a linear phase does to its input before quantising it.
enum class InputKind : int { kPlain = 0, kNorm = 1, kGated = 2 };

struct LinearOutput {
  int weight;
  int buffer;
  int bias;  // constant, or -1
  bool accumulate;
};

class Runner {
 public:
  explicit Runner(const RunnerConfig& config);
  ~Runner();

  // Building. Each returns the index of what it added. Data is copied.
  int add_weight(LayoutKind kind, int rows, int cols, int group, bool has_min, bool scale_f32, const uint8_t* data);
  int add_constant(const float* data, size_t count);
  int add_buffer(int width, bool is_sampled);
  void add_embed(int out, int weight, float scale);
  void add_norm(int x, int out, int weight, float eps, int group);
  void add_linear(int x, InputKind input, int second, float eps, GatedKind gated,
                  const std::vector<LinearOutput>& outputs);
  void add_rope_kv(int q, int k, int v, int layer, int inv_freq, int rotary_dim, bool interleaved, float attn_factor);
  void add_attention(int q, int out, int layer, float scale, int window, float soft_cap);
  void add_gated(GatedKind kind, int gate, int up, int out);
  void add_add(int x, int y, int out);
  void add_soft_cap(int x, float cap);
  void add_gather(int x, int out);
  // After the last op: `logits` is the buffer that holds [num_samples, vocab].
  void finish(int logits);

  // Throws std::runtime_error when a mask was not ready kMaskWaitS seconds after its logits were.
  void run(const Step& step);

  // Copies the first `count` rows that the last run left in a buffer: [count, width]. Between runs only.
  void read_rows(int buffer, int count, float* out) const;

  size_t kv_bytes_per_block() const;
  void copy_block(int source, int destination);
  void read_block(int block, uint8_t* out) const;
  void write_block(int block, const uint8_t* data);

  const RunnerConfig& config() const { return config_; }
  const char* kernels_name() const { return kernels_->name; }
  size_t weight_bytes() const { return weight_bytes_; }
  size_t scratch_bytes() const { return scratch_bytes_; }
  int64_t solo_runs() const { return team_->solo_runs(); }
  // Seconds per op kind of the last traced run; tracing costs one clock read per op.
  void set_tracing(bool on) { is_tracing_ = on; }
  std::vector<std::pair<std::string, double>> op_times() const;

 private:
  enum class OpKind : int { kEmbed, kNorm, kLinear, kRopeKv, kAttention, kGated, kAdd, kSoftCap, kGather, kSample };
  struct Op {
    OpKind kind;
    int a = -1, b = -1, c = -1;  // buffers
    int weight = -1;             // weight or constant
    int layer = 0;
    int width = 0;
    int group = 0;
    int window = 0;
    int rotary_dim = 0;
    bool interleaved = false;
    float eps = 0, scale = 1, cap = 0;
    InputKind input = InputKind::kPlain;
    GatedKind gated = GatedKind::kSilu;
    int table = -1;  // rope table
    std::vector<LinearOutput> outputs = {};
    bool needs[3] = {false, false, false};  // forms of activations, by ActKind
  };
  struct Buffer {
    int width;
    bool is_sampled;
    PageBuffer memory;
    float* row(int r) const {
      return reinterpret_cast<float*>(memory.data()) + static_cast<size_t>(r) * static_cast<size_t>(width);
    }
  };
  struct RopeTable {
    int constant, rotary_dim;
    float factor;
    std::vector<float> cos, sin;  // [max_position, rotary_dim / 2]
  };
  struct AttentionUnit {  // a tile of tokens of one row; split = -1 walks all splits
    int row, first, count, split;
  };

  struct Member;  // a thread's private scratch
  struct Share {  // of a phase's units
    int begin, end;
  };
  void execute(int member, const Step& step);
  void quantise_row(const Op& op, int row, int slot_rows, int slice, int slices, uint8_t* memory, Member& own);
  void quantise_rows(const Op& op, int rows, uint8_t* memory, Member& own);
  void linear(const Op& op, const Step& step, int member);
  int fewest_tiles(const Op& op, int rows) const;
  void multiply(const Op& op, int output, int rows, int part, int parts, Share row_blocks, uint8_t* memory,
                Member& own);
  void rope_kv(const Op& op, const Step& step, int member);
  void attention(const Op& op, const Step& step, int member);
  void attend_unit(const Op& op, const Step& step, const AttentionUnit& unit, int unit_index, int kv_head, Member& own);
  void plan_attention(const Step& step);
  void sample(const Step& step, int member);
  bool await_mask(const SampledPosition& sample);
  void rows_in_parallel(const Op& op, const Step& step, int member);
  void barrier(int member, const Op* next);
  // Every thread has a part of a phase's units and takes chunks from it, then from the parts of the others: what a
  // thread works on lies in its own cache from phase to phase, and one that is kept off its core holds up nobody.
  bool take(Member& own, int units, int chunk, Share* share);
  // Chunks in order, whoever comes: for units that differ in size.
  bool take_next(const Member& own, int units, int chunk, Share* share);
  std::atomic<int>& taken(int phase, int part) {
    return counters_[static_cast<size_t>(phase % kCounterSets * team_->size() + part)].value;
  }
  void prefetch_next(int member, const Op* next);
  KvView kv_view(int layer) const;
  int rows_of(int buffer, const Step& step) const {
    return buffers_[static_cast<size_t>(buffer)].is_sampled ? step.num_samples : step.num_tokens;
  }
  size_t act_offset(const Op& op, ActKind kind, int rows) const;
  size_t act_total(const Op& op, int rows) const;

  struct alignas(64) Counter {
    std::atomic<int> value{0};
  };
  // One in use, one that stragglers of the phase before may still look at, one that is cleared.
  static constexpr int kCounterSets = 3;

  RunnerConfig config_;
  const Kernels* kernels_;
  std::unique_ptr<ThreadTeam> team_;
  std::vector<Weight> weights_;
  std::vector<PageBuffer> weight_memory_;
  std::vector<std::vector<float>> constants_;
  std::vector<Buffer> buffers_;
  std::vector<RopeTable> tables_;
  std::vector<Op> ops_;
  std::unique_ptr<Counter[]> counters_;  // [kCounterSets][threads]
  std::vector<std::unique_ptr<Member>> members_;
  PageBuffer kv_;
  std::unique_ptr<PagesAhead> kv_ahead_;  // after kv_: its thread ends before the memory goes
  PageBuffer shared_acts_;
  std::vector<AttentionUnit> units_;
  std::vector<int> row_order_;   // size kept for plan_attention
  std::vector<int> merge_left_;  // sizes kept for plan_attention
  std::unique_ptr<std::atomic<int>[]> splits_left_;
  std::vector<int> unit_group_;      // unit -> its tile's slot in splits_left_
  std::vector<size_t> unit_result_;  // unit -> offset of its results in partials_
  PageBuffer partials_;
  int heads_at_once_ = 1;  // of a unit, taken by one thread
  size_t weight_bytes_ = 0, scratch_bytes_ = 0, arena_used_ = 0;
  int logits_ = -1;
  bool is_tracing_ = false;
  std::atomic<bool> mask_is_late_{false};
  double op_seconds_[10] = {};
};

}  // namespace firstlight
