// Python's view of sampling: one row, or the noise alone.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include <optional>
#include <stdexcept>
#include <vector>

#include "sampling.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace firstlight {
namespace {

using Logits = nb::ndarray<float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Words = nb::ndarray<const uint32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Ids = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

int32_t checked_vocab(const Logits& logits) {
  if (logits.shape(0) == 0 || logits.shape(0) > INT32_MAX - 256) {
    throw std::invalid_argument("`logits` must have 1 to 2147483391 entries");
  }
  return static_cast<int32_t>(logits.shape(0));
}

nb::tuple sample(Logits logits, float temperature, float top_p, int32_t top_k, float min_p, float presence,
                 float frequency, float repetition, uint64_t seed, uint32_t output_index, int32_t num_logprobs,
                 Ids bias_ids, Floats bias_values, Ids history, int32_t num_prompt, bool scalar,
                 std::optional<Words> mask) {
  const int32_t vocab = checked_vocab(logits);
  if (bias_ids.shape(0) != bias_values.shape(0)) {
    throw std::invalid_argument("`bias_ids` and `bias_values` must have as many entries");
  }
  SampleParams p;
  p.temperature = temperature;
  p.top_p = top_p;
  p.top_k = top_k;
  p.min_p = min_p;
  p.presence = presence;
  p.frequency = frequency;
  p.repetition = repetition;
  p.seed = seed;
  p.output_index = output_index;
  p.num_logprobs = num_logprobs;
  p.bias_ids = bias_ids.data();
  p.bias_values = bias_values.data();
  p.num_bias = static_cast<int32_t>(bias_ids.shape(0));
  p.history = history.data();
  p.num_history = static_cast<int32_t>(history.shape(0));
  p.num_prompt = num_prompt;
  if (mask && mask->shape(0) != static_cast<size_t>(mask_words(vocab))) {
    throw std::invalid_argument("`mask` must have a bit for each logit, in words of 32");
  }
  p.mask = mask ? mask->data() : nullptr;

  const size_t num_top = num_logprobs > 0 ? static_cast<size_t>(num_logprobs) : 0;
  std::vector<int32_t> top_ids(num_top);
  std::vector<float> top_logprobs(num_top);
  SampleResult r;
  r.top_ids = top_ids.data();
  r.top_logprobs = top_logprobs.data();
  {
    nb::gil_scoped_release released;
    SampleScratch scratch(vocab);
    (scalar ? sample_row_scalar : sample_row)(logits.data(), vocab, p, r, scratch);
  }
  nb::list ids, logprobs;
  for (int32_t id : top_ids) ids.append(id);
  for (float logprob : top_logprobs) logprobs.append(logprob);
  return nb::make_tuple(r.token, r.logprob, ids, logprobs);
}

void fill_noise(Logits out, uint64_t seed, uint32_t output_index, bool scalar) {
  const int32_t num_ids = checked_vocab(out);
  (scalar ? gumbel_noise_scalar : gumbel_noise)(seed, output_index, num_ids, out.data());
}

}  // namespace

void bind_sampling(nb::module_& m) {
  m.def("sample_row", &sample, "logits"_a.noconvert(), nb::kw_only(), "temperature"_a, "top_p"_a, "top_k"_a, "min_p"_a,
        "presence"_a, "frequency"_a, "repetition"_a, "seed"_a, "output_index"_a, "num_logprobs"_a, "bias_ids"_a,
        "bias_values"_a, "history"_a, "num_prompt"_a, "scalar"_a, "mask"_a.noconvert().none() = nb::none(),
        "Samples one row ([vocab] float32, restored). Returns (token, logprob, top_ids, top_logprobs). See "
        "csrc/sampling.h.");
  m.def("gumbel_noise", &fill_noise, "out"_a.noconvert(), nb::kw_only(), "seed"_a, "output_index"_a, "scalar"_a,
        "Fills `out` ([num_ids] float32) with the noise of ids [0, num_ids).");
}

}  // namespace firstlight
