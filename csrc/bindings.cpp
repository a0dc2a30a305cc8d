// The one bindings file of the core: checks what Python hands over, releases the GIL, calls plain functions.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "bindings_checks.h"
#include "math_scalar.h"
#include "pack.h"
#include "runner.h"

using namespace nanobind::literals;

namespace firstlight {

void bind_sampling(nb::module_& m);
void bind_kernels(nb::module_& m);

namespace {

// A Runner and what Python may not get wrong while building it.
class Core {
 public:
  Core(int num_threads, int max_tokens, int max_samples, int block_size, int num_blocks, int num_layers, int num_heads,
       int num_kv_heads, int head_dim, int max_position, int vocab_size, const std::string& kernels) {
    RunnerConfig c;
    check_range("num_threads", num_threads, 1, 257);
    check_range("max_tokens", max_tokens, 1, 1 << 20);
    check_range("max_samples", max_samples, 1, max_tokens + 1);
    check_range("num_blocks", num_blocks, 1, 1 << 28);
    check_range("num_layers", num_layers, 1, 1 << 12);
    check_range("num_kv_heads", num_kv_heads, 1, 1 << 10);
    check_range("max_position", max_position, 1, 1 << 24);
    check_range("vocab_size", vocab_size, 1, 1 << 24);
    if (block_size < 16 || block_size % 16 != 0) refuse("`block_size` must be a multiple of 16");
    if (head_dim < 16 || head_dim % 16 != 0 || head_dim > 1024)
      refuse("`head_dim` must be a multiple of 16, at most 1024");
    if (num_heads < num_kv_heads || num_heads % num_kv_heads != 0)
      refuse("`num_heads` must be a multiple of `num_kv_heads`");
    if (!find_kernels(kernels.c_str()))
      refuse("kernels `" + kernels + "` are unknown or this processor cannot run them");
    c.num_threads = num_threads;
    c.max_tokens = max_tokens;
    c.max_samples = max_samples;
    c.block_size = block_size;
    c.num_blocks = num_blocks;
    c.num_layers = num_layers;
    c.num_heads = num_heads;
    c.num_kv_heads = num_kv_heads;
    c.head_dim = head_dim;
    c.max_position = max_position;
    c.vocab_size = vocab_size;
    c.kernels = kernels;
    runner_ = std::make_unique<Runner>(c);
  }

  int add_weight(const std::string& kind, int rows, int cols, int group, bool has_min, bool scale_f32,
                 In<uint8_t, 1> data) {
    building();
    const Weight w = checked_weight(kind, rows, cols, group, has_min, scale_f32);
    if (data.shape(0) != w.total_bytes()) {
      refuse("weight data is " + std::to_string(data.shape(0)) + " bytes, the layout needs " +
             std::to_string(w.total_bytes()));
    }
    weights_.push_back({rows, cols});
    nb::gil_scoped_release release;
    return runner_->add_weight(w.kind, rows, cols, group, has_min, scale_f32, data.data());
  }
  int add_constant(In<float, 1> data) {
    building();
    constants_.push_back(static_cast<int>(data.shape(0)));
    return runner_->add_constant(data.data(), data.shape(0));
  }
  int add_buffer(int width, bool is_sampled) {
    building();
    check_range("width", width, 1, 1 << 24);
    widths_.push_back(width);
    sampled_.push_back(is_sampled);
    return runner_->add_buffer(width, is_sampled);
  }

  void add_embed(int out, int weight, float scale) {
    need_width(out, weight_at(weight).second);
    need_sampled(out, false);
    if (weight_at(weight).first < runner_->config().vocab_size)
      refuse("the embedding has fewer rows than the vocabulary");
    runner_->add_embed(out, weight, scale);
  }
  void add_norm(int x, int out, int weight, float eps, int group) {
    check_range("group", group, 1, width(x) + 1);
    if (width(x) % group != 0) refuse("`group` must divide the width");
    need_like(out, x);
    need_constant(weight, group);
    runner_->add_norm(x, out, weight, eps, group);
  }
  void add_linear(int x, const std::string& input, int second, float eps, const std::string& gated,
                  const std::vector<std::tuple<int, int, int, bool>>& outputs) {
    InputKind kind = InputKind::kPlain;
    GatedKind act = GatedKind::kSilu;
    const int w = width(x);
    if (input == "norm") {
      kind = InputKind::kNorm;
      need_constant(second, w);
    } else if (input == "gated") {
      kind = InputKind::kGated;
      act = gated_of(gated);
      need_like(second, x);
    } else if (input != "plain") {
      refuse("unknown input kind `" + input + "`");
    }
    if (outputs.empty()) refuse("a linear op needs an output");
    std::vector<LinearOutput> list;
    for (const auto& [weight, buffer, bias, accumulate] : outputs) {
      const auto [rows, cols] = weight_at(weight);
      if (cols != w)
        refuse("weight has " + std::to_string(cols) + " columns, its input is " + std::to_string(w) + " wide");
      need_width(buffer, rows);
      need_sampled(buffer, is_sampled(x));
      if (bias >= 0) need_constant(bias, rows);
      if (buffer == x || (kind == InputKind::kGated && buffer == second))
        refuse("a linear op may not write its own input");
      list.push_back({weight, buffer, bias, accumulate});
    }
    runner_->add_linear(x, kind, second, eps, act, list);
  }
  void add_rope_kv(int q, int k, int v, int layer, int inv_freq, int rotary_dim, bool interleaved, float attn_factor) {
    const auto& c = runner_->config();
    need_width(q, c.num_heads * c.head_dim);
    need_width(k, c.num_kv_heads * c.head_dim);
    need_width(v, c.num_kv_heads * c.head_dim);
    for (int buffer : {q, k, v}) need_sampled(buffer, false);
    check_range("layer", layer, 0, c.num_layers);
    if (rotary_dim < 2 || rotary_dim % 2 != 0 || rotary_dim > c.head_dim)
      refuse("`rotary_dim` must be even and at most head_dim");
    need_constant(inv_freq, rotary_dim / 2);
    runner_->add_rope_kv(q, k, v, layer, inv_freq, rotary_dim, interleaved, attn_factor);
  }
  void add_attention(int q, int out, int layer, float scale, int window, float soft_cap) {
    const auto& c = runner_->config();
    need_width(q, c.num_heads * c.head_dim);
    need_like(out, q);
    need_sampled(q, false);
    check_range("layer", layer, 0, c.num_layers);
    check_range("window", window, 0, 1 << 28);
    runner_->add_attention(q, out, layer, scale, window, soft_cap);
  }
  void add_gated(const std::string& kind, int gate, int up, int out) {
    need_like(up, gate);
    need_like(out, gate);
    runner_->add_gated(gated_of(kind), gate, up, out);
  }
  void add_add(int x, int y, int out) {
    need_like(y, x);
    need_like(out, x);
    runner_->add_add(x, y, out);
  }
  void add_soft_cap(int x, float cap) {
    width(x);
    runner_->add_soft_cap(x, cap);
  }
  void add_gather(int x, int out) {
    need_width(out, width(x));
    need_sampled(x, false);
    need_sampled(out, true);
    runner_->add_gather(x, out);
  }
  void finish(int logits) {
    building();
    need_width(logits, runner_->config().vocab_size);
    need_sampled(logits, true);
    is_finished_ = true;
    nb::gil_scoped_release released;
    runner_->finish(logits);
  }

  // rows: [num_rows, 4] first_token, num_tokens, start, offset of its block table in `tables`.
  // sample_floats: [num_samples, 6] temperature, top_p, min_p, presence, frequency, repetition.
  // sample_ints: [num_samples, 9] token, top_k, output_index, num_logprobs, num_prompt, bias begin, count, history
  // begin, count.
  // masks: [num_masks, mask_words(vocab)]; sample_masks: [num_samples] row of `masks`, -1 for none; mask_ready:
  // [num_masks], 0 while another thread still fills that row.
  void run(In<int32_t, 1> tokens, In<int32_t, 1> positions, In<int32_t, 2> rows, In<int32_t, 1> tables,
           In<float, 2> sample_floats, In<int32_t, 2> sample_ints, In<uint64_t, 1> seeds, In<int32_t, 1> bias_ids,
           In<float, 1> bias_values, In<int32_t, 1> histories, Out<int32_t, 1> out_tokens, Out<float, 1> out_logprobs,
           Out<int32_t, 2> top_ids, Out<float, 2> top_logprobs, std::optional<Out<float, 2>> logits,
           std::optional<In<uint32_t, 2>> masks, std::optional<In<int32_t, 1>> sample_masks,
           std::optional<In<int32_t, 1>> mask_ready) {
    if (!is_finished_) refuse("run() before finish()");
    const auto& c = runner_->config();
    const size_t num_tokens = tokens.shape(0), num_rows = rows.shape(0), num_samples = sample_ints.shape(0);
    check_range("num_tokens", static_cast<long long>(num_tokens), 1, c.max_tokens + 1);
    check_range("num_samples", static_cast<long long>(num_samples), 0, c.max_samples + 1);
    if (positions.shape(0) != num_tokens || rows.shape(1) != 4) refuse("`positions` or `rows` has the wrong shape");
    if (sample_floats.shape(0) != num_samples || sample_floats.shape(1) != 6 || sample_ints.shape(1) != 9 ||
        seeds.shape(0) != num_samples || out_tokens.shape(0) != num_samples || out_logprobs.shape(0) != num_samples ||
        top_ids.shape(0) != num_samples || top_logprobs.shape(0) != num_samples ||
        top_ids.shape(1) != top_logprobs.shape(1) || bias_ids.shape(0) != bias_values.shape(0)) {
      refuse("a sampling array has the wrong shape");
    }
    if (logits && (logits->shape(0) != num_samples || logits->shape(1) != static_cast<size_t>(c.vocab_size))) {
      refuse("`logits` must be [num_samples, vocab]");
    }
    if (masks.has_value() != sample_masks.has_value() || masks.has_value() != mask_ready.has_value()) {
      refuse("`masks`, `sample_masks` and `mask_ready` go together");
    }
    if (masks && (masks->shape(1) != static_cast<size_t>(mask_words(c.vocab_size)) ||
                  mask_ready->shape(0) != masks->shape(0) || sample_masks->shape(0) != num_samples)) {
      refuse("a mask array has the wrong shape");
    }
    std::vector<StepRow> step_rows(num_rows);
    int next = 0;
    for (size_t r = 0; r < num_rows; ++r) {
      const int32_t* v = rows.data() + 4 * r;
      StepRow& row = step_rows[r];
      row = {v[0], v[1], v[2], tables.data() + v[3]};
      check_range("first_token", row.first_token, next, next + 1);
      check_range("row tokens", row.num_tokens, 1, static_cast<long long>(num_tokens) - next + 1);
      check_range("start", row.start, 0, c.max_position - row.num_tokens + 1);
      const int blocks = (row.start + row.num_tokens + c.block_size - 1) / c.block_size;
      check_range("block table", v[3], 0, static_cast<long long>(tables.shape(0)) - blocks + 1);
      for (int b = 0; b < blocks; ++b) check_range("block id", row.block_table[b], 0, c.num_blocks);
      for (int t = 0; t < row.num_tokens; ++t) {
        check_range("position", positions.data()[next + t], row.start + t, row.start + t + 1);
      }
      next += row.num_tokens;
    }
    if (static_cast<size_t>(next) != num_tokens) refuse("the rows do not cover the tokens");
    for (size_t t = 0; t < num_tokens; ++t) check_range("token id", tokens.data()[t], 0, c.vocab_size);

    std::vector<SampleParams> params(num_samples);
    std::vector<SampleResult> results(num_samples);
    std::vector<SampledPosition> samples(num_samples);
    const size_t num_top = top_ids.shape(1);
    for (size_t i = 0; i < num_samples; ++i) {
      const float* f = sample_floats.data() + 6 * i;
      const int32_t* n = sample_ints.data() + 9 * i;
      check_range("sampled token", n[0], i > 0 ? samples[i - 1].token + 1 : 0, static_cast<long long>(num_tokens));
      check_range("num_logprobs", n[3], -1, static_cast<long long>(num_top) + 1);
      check_range("bias count", n[6], 0, static_cast<long long>(bias_ids.shape(0)) - n[5] + 1);
      check_range("history count", n[8], 0, static_cast<long long>(histories.shape(0)) - n[7] + 1);
      if (n[5] < 0 || n[7] < 0) refuse("a sampling offset is negative");
      SampleParams& p = params[i];
      p.temperature = f[0];
      p.top_p = f[1];
      p.min_p = f[2];
      p.presence = f[3];
      p.frequency = f[4];
      p.repetition = f[5];
      p.top_k = n[1];
      p.seed = seeds.data()[i];
      p.output_index = static_cast<uint32_t>(n[2]);
      p.num_logprobs = n[3];
      p.num_prompt = n[4];
      p.bias_ids = bias_ids.data() + n[5];
      p.bias_values = bias_values.data() + n[5];
      p.num_bias = n[6];
      p.history = histories.data() + n[7];
      p.num_history = n[8];
      results[i].top_ids = top_ids.data() + i * num_top;
      results[i].top_logprobs = top_logprobs.data() + i * num_top;
      const int32_t mask = masks ? sample_masks->data()[i] : -1;
      check_range("mask", mask, -1, masks ? static_cast<long long>(masks->shape(0)) : 0);
      if (mask >= 0) p.mask = masks->data() + static_cast<size_t>(mask) * masks->shape(1);
      samples[i] = {n[0], &p, &results[i], mask >= 0 ? mask_ready->data() + mask : nullptr};
    }
    Step step{};
    step.token_ids = tokens.data();
    step.positions = positions.data();
    step.num_tokens = static_cast<int>(num_tokens);
    step.rows = step_rows.data();
    step.num_rows = static_cast<int>(num_rows);
    step.samples = samples.data();
    step.num_samples = static_cast<int>(num_samples);
    step.logits_out = logits ? logits->data() : nullptr;
    {
      nb::gil_scoped_release released;
      runner_->run(step);
    }
    for (size_t i = 0; i < num_samples; ++i) {
      out_tokens.data()[i] = results[i].token;
      out_logprobs.data()[i] = results[i].logprob;
    }
  }

  void read_rows(int buffer, Out<float, 2> out) {
    check_range("buffer", buffer, 0, static_cast<long long>(widths_.size()));
    const size_t at = static_cast<size_t>(buffer);
    const RunnerConfig& c = runner_->config();
    if (out.shape(1) != static_cast<size_t>(widths_[at]))
      refuse("buffer " + std::to_string(buffer) + " is " + std::to_string(widths_[at]) + " wide");
    check_range("row count", static_cast<long long>(out.shape(0)), 0,
                (sampled_[at] ? c.max_samples : c.max_tokens) + 1);
    runner_->read_rows(buffer, static_cast<int>(out.shape(0)), out.data());
  }

  void copy_block(int source, int destination) {
    check_block(source);
    check_block(destination);
    runner_->copy_block(source, destination);
  }
  void read_block(int block, Out<uint8_t, 1> out) {
    check_block(block);
    if (out.shape(0) != runner_->kv_bytes_per_block())
      refuse("a block has " + std::to_string(runner_->kv_bytes_per_block()) + " bytes");
    runner_->read_block(block, out.data());
  }
  void write_block(int block, In<uint8_t, 1> data) {
    check_block(block);
    if (data.shape(0) != runner_->kv_bytes_per_block())
      refuse("a block has " + std::to_string(runner_->kv_bytes_per_block()) + " bytes");
    runner_->write_block(block, data.data());
  }

  Runner& runner() { return *runner_; }

 private:
  void building() const {
    if (is_finished_) refuse("the program is finished");
  }
  int width(int buffer) const {
    building();
    check_range("buffer", buffer, 0, static_cast<long long>(widths_.size()));
    return widths_[static_cast<size_t>(buffer)];
  }
  void need_width(int buffer, int expected) const {
    if (width(buffer) != expected)
      refuse("buffer is " + std::to_string(width(buffer)) + " wide, must be " + std::to_string(expected));
  }
  // A sampled buffer has max_samples rows, any other max_tokens: an op may not run over both kinds.
  bool is_sampled(int buffer) const { return width(buffer) > 0 && sampled_[static_cast<size_t>(buffer)]; }
  void need_sampled(int buffer, bool expected) const {
    if (is_sampled(buffer) != expected) {
      refuse("buffer " + std::to_string(buffer) + (expected ? " must be" : " must not be") + " a sampled buffer");
    }
  }
  void need_like(int buffer, int other) const {
    need_width(buffer, width(other));
    need_sampled(buffer, is_sampled(other));
  }
  void need_constant(int index, int expected) const {
    check_range("constant", index, 0, static_cast<long long>(constants_.size()));
    if (constants_[static_cast<size_t>(index)] != expected) refuse("a constant has the wrong length");
  }
  std::pair<int, int> weight_at(int index) const {
    check_range("weight", index, 0, static_cast<long long>(weights_.size()));
    return weights_[static_cast<size_t>(index)];
  }
  void check_block(int block) const { check_range("block id", block, 0, runner_->config().num_blocks); }

  std::unique_ptr<Runner> runner_;
  std::vector<std::pair<int, int>> weights_;
  std::vector<int> constants_, widths_;
  std::vector<bool> sampled_;
  bool is_finished_ = false;
};

void pack(const std::string& kind, int group, bool has_min, bool scale_f32, In<uint8_t, 2> codes, In<float, 2> scales,
          std::optional<In<float, 2>> mins, Out<uint8_t, 1> out) {
  const Weight w = checked_weight(kind, static_cast<int>(codes.shape(0)), static_cast<int>(codes.shape(1)), group,
                                  has_min, scale_f32);
  const size_t groups = codes.shape(1) / static_cast<size_t>(group);
  if (scales.shape(0) != codes.shape(0) || scales.shape(1) != groups) refuse("`scales` has the wrong shape");
  if (mins && (mins->shape(0) != codes.shape(0) || mins->shape(1) != groups)) refuse("`mins` has the wrong shape");
  if (!mins && (has_min || w.kind == LayoutKind::kNibble)) refuse("the layout needs mins");
  if (out.shape(0) != w.total_bytes()) refuse("`out` must have " + std::to_string(w.total_bytes()) + " bytes");
  nb::gil_scoped_release released;
  pack_codes(w, codes.data(), scales.data(), mins ? mins->data() : nullptr, out.data());
}

void pack_floats(const std::string& kind, int rows, int cols, In<uint8_t, 1> values, Out<uint8_t, 1> out) {
  const Weight w = checked_weight(kind, rows, cols, 0, false, false);
  const size_t size = w.kind == LayoutKind::kFloat ? 4 : 2;
  if (w.kind == LayoutKind::kNibble || w.kind == LayoutKind::kByte) refuse("pack_floats takes half, bf16 or float");
  if (values.shape(0) != static_cast<size_t>(rows) * static_cast<size_t>(cols) * size)
    refuse("`values` has the wrong size");
  if (out.shape(0) != w.total_bytes()) refuse("`out` must have " + std::to_string(w.total_bytes()) + " bytes");
  nb::gil_scoped_release released;
  pack_values(w, values.data(), out.data());
}

}  // namespace
}  // namespace firstlight

NB_MODULE(_native, m) {
  using namespace firstlight;
  m.doc() = "firstlight's native kernels and program runner";
  nb::class_<Core>(m, "Runner")
      .def(nb::init<int, int, int, int, int, int, int, int, int, int, int, const std::string&>(), "num_threads"_a,
           "max_tokens"_a, "max_samples"_a, "block_size"_a, "num_blocks"_a, "num_layers"_a, "num_heads"_a,
           "num_kv_heads"_a, "head_dim"_a, "max_position"_a, "vocab_size"_a, "kernels"_a)
      .def("add_weight", &Core::add_weight)
      .def("add_constant", &Core::add_constant)
      .def("add_buffer", &Core::add_buffer)
      .def("add_embed", &Core::add_embed)
      .def("add_norm", &Core::add_norm)
      .def("add_linear", &Core::add_linear)
      .def("add_rope_kv", &Core::add_rope_kv)
      .def("add_attention", &Core::add_attention)
      .def("add_gated", &Core::add_gated)
      .def("add_add", &Core::add_add)
      .def("add_soft_cap", &Core::add_soft_cap)
      .def("add_gather", &Core::add_gather)
      .def("finish", &Core::finish)
      .def("run", &Core::run, "tokens"_a, "positions"_a, "rows"_a, "tables"_a, "sample_floats"_a, "sample_ints"_a,
           "seeds"_a, "bias_ids"_a, "bias_values"_a, "histories"_a, "out_tokens"_a.noconvert(),
           "out_logprobs"_a.noconvert(), "top_ids"_a.noconvert(), "top_logprobs"_a.noconvert(),
           "logits"_a.noconvert().none(), "masks"_a.noconvert().none() = nb::none(),
           "sample_masks"_a.noconvert().none() = nb::none(), "mask_ready"_a.noconvert().none() = nb::none())
      .def("read_rows", &Core::read_rows, "buffer"_a, "out"_a.noconvert())
      .def("copy_block", &Core::copy_block)
      .def("read_block", &Core::read_block, "block"_a, "out"_a.noconvert())
      .def("write_block", &Core::write_block)
      .def("set_tracing", [](Core& c, bool on) { c.runner().set_tracing(on); })
      .def("op_times", [](Core& c) { return c.runner().op_times(); })
      .def_prop_ro("kernels", [](Core& c) { return std::string(c.runner().kernels_name()); })
      .def_prop_ro("kv_bytes_per_block", [](Core& c) { return c.runner().kv_bytes_per_block(); })
      .def_prop_ro("weight_bytes", [](Core& c) { return c.runner().weight_bytes(); })
      .def_prop_ro("scratch_bytes", [](Core& c) { return c.runner().scratch_bytes(); })
      .def_prop_ro("solo_runs", [](Core& c) { return c.runner().solo_runs(); });
  m.def("pack", &pack, "kind"_a, "group"_a, "has_min"_a, "scale_f32"_a, "codes"_a, "scales"_a, "mins"_a.none(),
        "out"_a.noconvert());
  m.def("pack_floats", &pack_floats, "kind"_a, "rows"_a, "cols"_a, "values"_a, "out"_a.noconvert());
  bind_sampling(m);
  bind_kernels(m);
}
