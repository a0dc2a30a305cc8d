// A step: the phases of the program in order, each shared by all threads.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <thread>

#include "math_scalar.h"
#include "runner_parts.h"

namespace firstlight {
namespace {

constexpr int kRowBlockPack = 4;            // row blocks that a kernel may take at once
constexpr size_t kChunkBytes = 16 << 10;    // weight bytes worth taking a chunk for, when memory is the limit
constexpr int64_t kChunkMacs = 3'000'000;   // about 30 us of arithmetic, when arithmetic is
constexpr size_t kIdlePrefetch = 48 << 10;  // bytes of the next weight each member asks for while it waits
constexpr int kTilesPerPart = 3;            // of activations, from which on a thread multiplies a part of the rows
constexpr int kTilesPerThread = 3;          // of activations, from which on a thread quantises a tile at once
constexpr int kMostSlices = 4;              // into which a row is cut while every thread norms it for itself
constexpr int kMaskWaitS = 30;              // far above what filling a mask may take
constexpr const char* kOpNames[] = {"embed", "norm", "linear",   "rope_kv", "attention",
                                    "gated", "add",  "soft_cap", "gather",  "sample"};

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

void Runner::run(const Step& step) {
  for (int i = 0; i < kCounterSets * team_->size(); ++i)
    counters_[static_cast<size_t>(i)].value.store(0, std::memory_order_relaxed);
  for (auto& member : members_) member->phase = 0;
  plan_attention(step);
  kv_ahead_->will_write(static_cast<size_t>(highest_block(step, config_.block_size)));
  if (is_tracing_) std::fill(std::begin(op_seconds_), std::end(op_seconds_), 0.0);
  mask_is_late_.store(false, std::memory_order_relaxed);
  team_->run([&](int member) { execute(member, step); });
  if (mask_is_late_.load(std::memory_order_relaxed)) {
    throw std::runtime_error("a mask was not ready " + std::to_string(kMaskWaitS) + " s after its logits");
  }
}

bool Runner::take(Member& own, int units, int chunk, Share* share) {
  const int parts = team_->active(), chunks = (units + chunk - 1) / chunk;
  for (int i = 0; i < parts; ++i) {
    const int part = (own.index + i) % parts;
    const int first = chunks * part / parts, last = chunks * (part + 1) / parts;
    if (first + taken(own.phase, part).load(std::memory_order_relaxed) >= last) continue;
    const int at = first + taken(own.phase, part).fetch_add(1, std::memory_order_relaxed);
    if (at >= last) continue;
    *share = {at * chunk, std::min(units, (at + 1) * chunk)};
    return true;
  }
  return false;
}

bool Runner::take_next(const Member& own, int units, int chunk, Share* share) {
  const int begin = taken(own.phase, 0).fetch_add(chunk, std::memory_order_relaxed);
  *share = {begin, std::min(units, begin + chunk)};
  return begin < units;
}

void Runner::barrier(int member, const Op* next) {
  if (next != nullptr && next->kind == OpKind::kLinear) {
    prefetch_next(member, next);
  } else {
    team_->barrier(member);
  }
  Member& own = *members_[static_cast<size_t>(member)];
  ++own.phase;
  if (member != 0) return;
  for (int part = 0; part < team_->size(); ++part) taken(own.phase + 2, part).store(0, std::memory_order_relaxed);
}

// Waits at the barrier, and meanwhile asks for the first bytes of this member's part of the next weights.
void Runner::prefetch_next(int member, const Op* next) {
  int total = 0;
  for (const auto& o : next->outputs) total += weights_[static_cast<size_t>(o.weight)].row_blocks();
  int row_block = total * member / team_->active();
  const Weight* w = nullptr;
  for (const auto& o : next->outputs) {
    w = &weights_[static_cast<size_t>(o.weight)];
    if (row_block < w->row_blocks()) break;
    row_block -= w->row_blocks();
  }
  const size_t begin = std::min(static_cast<size_t>(row_block) * w->row_block_bytes(), w->total_bytes());
  const char* p = reinterpret_cast<const char*>(w->data) + begin;
  const char* end = p + std::min(kIdlePrefetch, w->total_bytes() - begin);
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
  Member& own = *members_[static_cast<size_t>(member)];
  const int rows = op.kind == OpKind::kGather ? step.num_samples : rows_of(op.a, step);
  constexpr int kChunk = 4;
  const auto row_of = [this](int buffer, int r) { return buffers_[static_cast<size_t>(buffer)].row(r); };
  for (Share share; take(own, rows, kChunk, &share);) {
    for (int r = share.begin; r < share.end; ++r) {
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

// The slice-th part of `slices` of one row's groups. A norm needs the whole row for any of them.
void Runner::quantise_row(const Op& op, int row, int slot_rows, int slice, int slices, uint8_t* memory, Member& own) {
  const float* x = buffers_[static_cast<size_t>(op.a)].row(row);
  float* scratch = reinterpret_cast<float*>(own.row.data());
  if (op.input == InputKind::kNorm) {
    kernels_->rms_norm(x, constants_[static_cast<size_t>(op.b)].data(), op.eps, op.width, scratch);
    x = scratch;
  } else if (op.input == InputKind::kGated) {
    const int groups = op.width / 32, from = slices == 1 ? 0 : groups * slice / slices * 32;
    const int to = slices == 1 ? op.width : groups * (slice + 1) / slices * 32;
    kernels_->gated(op.gated, x + from, buffers_[static_cast<size_t>(op.b)].row(row) + from, to - from, scratch + from);
    x = scratch;
  }
  for (int k = 0; k < 3; ++k) {
    if (!op.needs[k]) continue;
    const auto kind = static_cast<ActKind>(k);
    const Activations a = act_view(kind, kernels_->act_layout(kind, slot_rows), slot_rows, op.width,
                                   memory + act_offset(op, kind, slot_rows));
    const int groups = act_groups(a);
    kernels_->quantise(x, a, row, groups * slice / slices, groups * (slice + 1) / slices);
  }
}

// Rows of a tile share cache lines, which two threads would take from each other: a thread takes whole tiles where
// these can be shared out evenly, else many rows, or where all rows are one tile, a slice of their groups.
void Runner::quantise_rows(const Op& op, int rows, uint8_t* memory, Member& own) {
  const ActKind kind = act_kind(weights_[static_cast<size_t>(op.outputs[0].weight)]);
  const Activations a = act_view(kind, kernels_->act_layout(kind, rows), rows, op.width, memory);
  const int num_tiles = a.num_tiles(), threads = team_->active();
  const bool by_tile = num_tiles == threads || num_tiles >= kTilesPerThread * threads;
  const bool by_slice = num_tiles < threads && !op.needs[static_cast<int>(ActKind::kFloat)] && threads <= kMostSlices;
  const int units = by_slice ? threads : by_tile ? num_tiles : rows;
  const int chunk = by_tile || by_slice ? 1 : (rows + threads - 1) / threads;
  for (Share share; take(own, units, chunk, &share);) {
    const int begin = by_slice ? 0 : by_tile ? a.tile_start(share.begin) : share.begin;
    const int end = by_slice ? rows : by_tile ? a.tile_start(share.end) : share.end;
    for (int r = begin; r < end; ++r) {
      quantise_row(op, r, rows, by_slice ? share.begin : 0, by_slice ? threads : 1, memory, own);
    }
  }
}

void Runner::linear(const Op& op, const Step& step, int member) {
  Member& own = *members_[static_cast<size_t>(member)];
  const int rows = rows_of(op.a, step);
  uint8_t* memory = rows <= kPrivateRows ? own.acts.data() : shared_acts_.data();
  if (rows <= kPrivateRows) {
    for (int r = 0; r < rows; ++r) quantise_row(op, r, rows, 0, 1, memory, own);
  } else {
    quantise_rows(op, rows, memory, own);
    barrier(member, &op);
  }
  int total = 0;
  for (const auto& o : op.outputs) total += weights_[static_cast<size_t>(o.weight)].row_blocks();
  const Weight& first = weights_[static_cast<size_t>(op.outputs[0].weight)];
  // With rows enough, a thread's part is its rows times all outputs, so that it finds them in its cache before and
  // after; with fewer, all rows times its part of the outputs: each weight is read once.
  const int threads = team_->active(), tiles = fewest_tiles(op, rows),
            parts = tiles >= kTilesPerPart * threads ? threads : 1;
  const int by_bytes = static_cast<int>(kChunkBytes / first.row_block_bytes()) + 1;
  const int by_macs = static_cast<int>(kChunkMacs / (8ll * op.width * rows / parts)) + 1;
  const int by_share = std::max(1, total * parts / (6 * threads));
  // Whole packs of the widest kernels, which are whole cache lines of output too.
  const int chunk = std::max(1, std::min({by_bytes * 4, by_macs, by_share}) / kRowBlockPack) * kRowBlockPack;
  const int chunks = (total + chunk - 1) / chunk;
  for (Share share; take(own, chunks * parts, 1, &share);) {
    const int part = share.begin / chunks, begin = share.begin % chunks * chunk;
    int base = 0;
    for (int o = 0; o < static_cast<int>(op.outputs.size()); ++o) {
      const int row_blocks = weights_[static_cast<size_t>(op.outputs[static_cast<size_t>(o)].weight)].row_blocks();
      const int from = std::max(begin - base, 0), to = std::min(begin + chunk - base, row_blocks);
      if (from < to) multiply(op, o, rows, part, parts, {from, to}, memory, own);
      base += row_blocks;
    }
  }
}

// Of the forms of activations that an op needs, the one with fewest tiles.
int Runner::fewest_tiles(const Op& op, int rows) const {
  int fewest = rows;
  for (int k = 0; k < 3; ++k) {
    const auto kind = static_cast<ActKind>(k);
    if (op.needs[k])
      fewest = std::min(fewest, act_view(kind, kernels_->act_layout(kind, rows), rows, 32, nullptr).num_tiles());
  }
  return fewest;
}

// One output's row blocks for one of `parts` parts of the rows.
void Runner::multiply(const Op& op, int output, int rows, int part, int parts, Share row_blocks, uint8_t* memory,
                      Member& own) {
  const LinearOutput& o = op.outputs[static_cast<size_t>(output)];
  const Weight& w = weights_[static_cast<size_t>(o.weight)];
  const ActKind kind = act_kind(w);
  const Activations whole =
      act_view(kind, kernels_->act_layout(kind, rows), rows, op.width, memory + act_offset(op, kind, rows));
  const int begin = whole.num_tiles() * part / parts, end = whole.num_tiles() * (part + 1) / parts;
  const Buffer& out = buffers_[static_cast<size_t>(o.buffer)];
  const float* bias = o.bias >= 0 ? constants_[static_cast<size_t>(o.bias)].data() : nullptr;
  kernels_->gemm(w, tiles_of(whole, begin, end), bias, o.accumulate, out.row(whole.tile_start(begin)),
                 static_cast<size_t>(out.width), row_blocks.begin, row_blocks.end, own.gemm.data());
}

// ---------------------------------------------------------------- sampling

void Runner::sample(const Step& step, int member) {
  Member& own = *members_[static_cast<size_t>(member)];
  const size_t vocab = static_cast<size_t>(config_.vocab_size);
  for (Share share; take_next(own, step.num_samples, 1, &share);) {
    const int i = share.begin;
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
