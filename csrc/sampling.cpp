// Sampling: the steps of sampling.h over the passes of either path. Selection runs here, once, for both.
#include "sampling.h"

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <new>

#include "sampling_passes.h"

namespace firstlight {
namespace {

using sampling::clean;
using sampling::Cut;
using sampling::kNegInf;
using sampling::num_groups;
using sampling::Passes;

constexpr int kBins = 2048;           // bins of selection's first level
constexpr float kBinsPerNat = 64.0f;  // 32 nats of width: below that lies 1e-14 of the mass
constexpr float kListMargin = 1e-3f;  // nats by which a candidate list exceeds what it must hold, for rounding
constexpr int32_t kTouched = 1, kInHistory = 2, kOneOutput = 4;

struct Row {
  const Passes& passes;
  float* logits;
  int32_t vocab;
  const SampleParams& params;
  SampleScratch& scratch;
};

// Fills scratch.group_max; returns the row's largest logit.
float row_max(const Row& row) {
  float* groups = row.scratch.group_max.get();
  row.passes.group_max(row.logits, row.vocab, groups);
  return *std::max_element(groups, groups + num_groups(row.vocab)) + 0.0f;  // + 0: one zero, whichever the path found
}

// The lowest id whose logit is `max`. Wants scratch.group_max.
int32_t first_of(const Row& row, float max) {
  const float* groups = row.scratch.group_max.get();
  const auto group = static_cast<int32_t>(std::find(groups, groups + num_groups(row.vocab), max) - groups);
  int32_t id = group / 8 * sampling::kGroupBlock;
  while (clean(row.logits[id]) != max) ++id;
  return id;
}

// A logit with at least `k` logits at or above it, and few more: the k-th largest group has one in each of k groups.
float kth_bound(const Row& row, int32_t k) {
  const int32_t groups = num_groups(row.vocab);
  if (k > groups) return -FLT_MAX;
  float* order = row.scratch.group_order.get();
  std::copy_n(row.scratch.group_max.get(), groups, order);
  std::nth_element(order, order + (k - 1), order + groups, std::greater<>());
  return std::max(order[k - 1], -FLT_MAX);
}

// Unsigned integers in the order of the logits.
uint32_t order_key(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(clean(x) + 0.0f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

uint32_t bin_of(float scaled) {
  return static_cast<uint32_t>(static_cast<int32_t>(std::min(-scaled * kBinsPerNat, kBins - 1.0f)));
}

// The bin where the running sum reaches `target`; adds the bins before it to `sum`. Without one: the last with any
// mass, and `is_reached` false.
struct Crossing {
  uint32_t bin = 0;
  bool is_reached = false;
};

Crossing find_crossing(const double* mass, int bins, double target, double& sum) {
  uint32_t last = 0;
  double before_last = sum;
  for (int bin = 0; bin < bins; ++bin) {
    if (mass[bin] == 0.0) continue;
    last = static_cast<uint32_t>(bin);
    before_last = sum;
    sum += mass[bin];
    if (sum >= target) break;
  }
  const bool is_reached = sum >= target;
  sum = before_last;
  return {last, is_reached};
}

// Sets `cut` after the fewest of the `n` candidates, larger logits and then lower ids first, whose weights reach
// `target` > 0; leaves it when all of them do not. Bins by scaled logit, then, inside the bin that crosses, by each
// byte of the logit's key: no sort, and a cost linear in n.
void find_cut(const Row& row, int32_t n, double target, Cut& cut) {
  const SampleScratch& s = row.scratch;
  double mass[kBins] = {};
  for (int32_t i = 0; i < n; ++i) mass[bin_of(s.scaled[i])] += static_cast<double>(s.weight[i]);
  double sum = 0.0;
  const Crossing first = find_crossing(mass, kBins, target, sum);
  if (!first.is_reached) return;

  int32_t* chosen = s.chosen.get();
  int32_t left = 0;
  for (int32_t i = 0; i < n; ++i) {
    if (bin_of(s.scaled[i]) == first.bin) chosen[left++] = i;
  }
  for (int shift = 24; shift >= 0 && left > 1; shift -= 8) {
    const auto digit = [&](int32_t i) { return 255 - (order_key(row.logits[s.id[i]]) >> shift & 255); };
    std::fill_n(mass, 256, 0.0);
    for (int32_t j = 0; j < left; ++j) mass[digit(chosen[j])] += static_cast<double>(s.weight[chosen[j]]);
    const uint32_t bin = find_crossing(mass, 256, target, sum).bin;
    left = static_cast<int32_t>(std::remove_if(chosen, chosen + left, [&](int32_t i) { return digit(i) != bin; }) -
                                chosen);
  }
  int32_t j = 0;  // what is left are equal logits, ids ascending
  while (j < left - 1 && (sum += static_cast<double>(s.weight[chosen[j]])) < target) ++j;
  cut = {clean(row.logits[s.id[chosen[j]]]), s.id[chosen[j]]};
}

// Drops the candidates beyond `cut`. Returns how many are left.
int32_t drop_beyond(const Row& row, int32_t n, const Cut& cut) {
  SampleScratch& s = row.scratch;
  int32_t kept = 0;
  for (int32_t i = 0; i < n; ++i) {  // without a branch: it would be guessed wrong often
    const int32_t id = s.id[i];
    const float x = clean(row.logits[id]);
    s.scaled[kept] = s.scaled[i];
    s.id[kept] = id;
    kept += static_cast<int32_t>(x > cut.logit) |
            (static_cast<int32_t>(x == cut.logit) & static_cast<int32_t>(id <= cut.id));
  }
  return kept;
}

// Lists candidates that hold the top_k largest, and cuts after those. Returns how many candidates there are.
int32_t cut_top_k(const Row& row, float max, float inv_t, Cut& cut) {
  SampleScratch& s = row.scratch;
  const int32_t k = row.params.top_k;
  const float floor = std::max((kth_bound(row, k) - max) * inv_t, -FLT_MAX);
  const int32_t n = row.passes.list_above(row.logits, row.vocab, max, inv_t, floor, s.scaled.get(), s.id.get());
  std::fill_n(s.weight.get(), n, 1.0f);
  find_cut(row, n, static_cast<double>(k), cut);  // fewer than k are listed only when the rest have probability 0
  return n;
}

// Narrows `cut` to top_p. `listed` is the number of candidates top_k listed, -1 when it is off.
void cut_top_p(const Row& row, float max, float inv_t, int32_t listed, Cut& cut) {
  SampleScratch& s = row.scratch;
  double total = 0.0;
  int32_t n = 0;
  if (listed >= 0) {
    n = drop_beyond(row, listed, cut);
  } else {
    // Ids each below (1 - top_p) / vocab of the total hold less than 1 - top_p together: none of them is needed.
    total = row.passes.sum_exp(row.logits, row.vocab, max, inv_t);
    const double least = (1.0 - std::max(static_cast<double>(row.params.top_p), 0.0)) * total / row.vocab;
    const float floor = std::min(sampling::log_pos(static_cast<float>(least)) - kListMargin, 0.0f);
    n = row.passes.list_above(row.logits, row.vocab, max, inv_t, floor, s.scaled.get(), s.id.get());
  }
  row.passes.exp_list(s.scaled.get(), n, s.weight.get());
  if (listed >= 0) {
    for (int32_t i = 0; i < n; ++i) total += static_cast<double>(s.weight[i]);
  }
  // Not reached, nothing is cut: then top_p is 1 but for rounding.
  find_cut(row, n, std::max(static_cast<double>(row.params.top_p) * total, DBL_MIN), cut);
}

int32_t choose(const Row& row, float max) {
  const SampleParams& p = row.params;
  if (max == kNegInf) return 0;
  if (!(p.temperature > 0.0f)) return first_of(row, max);
  const float inv_t = std::clamp(1.0f / p.temperature, 1e-30f, FLT_MAX);
  Cut cut;
  int32_t listed = -1;
  if (p.top_k > 0 && p.top_k < row.vocab) listed = cut_top_k(row, max, inv_t, cut);
  if (p.top_p < 1.0f) cut_top_p(row, max, inv_t, listed, cut);
  const float floor = p.min_p > 0.0f ? sampling::log_pos(std::clamp(p.min_p, FLT_MIN, 1.0f)) : kNegInf;
  return row.passes.noisy_argmax(row.logits, row.vocab, max, inv_t, cut, floor, p.seed, p.output_index);
}

// Writes the row's best into the result, by logit and then id: finer than the rounded log-probability.
void fill_top(const Row& row, float max, float log_total, SampleResult& result) {
  SampleScratch& s = row.scratch;
  const int32_t wanted = std::min(row.params.num_logprobs, row.vocab);
  int32_t n = 0;
  if (max > kNegInf) {
    n = row.passes.list_above(row.logits, row.vocab, 0.0f, 1.0f, kth_bound(row, wanted), s.scaled.get(), s.id.get());
  }
  int32_t* order = s.chosen.get();
  for (int32_t i = 0; i < n; ++i) order[i] = i;
  const int32_t found = std::min(n, wanted);
  std::partial_sort(order, order + found, order + n, [&](int32_t a, int32_t b) {
    return s.scaled[a] > s.scaled[b] || (s.scaled[a] == s.scaled[b] && a < b);
  });
  for (int32_t i = 0; i < found; ++i) {
    result.top_ids[i] = s.id[order[i]];
    result.top_logprobs[i] = (s.scaled[order[i]] - max) - log_total;
  }
  int32_t id = 0;
  for (int32_t i = found; i < wanted; ++i, ++id) {  // ids without probability, lowest first
    while (clean(row.logits[id]) > kNegInf) ++id;
    result.top_ids[i] = id;
    result.top_logprobs[i] = kNegInf;
  }
  std::fill(result.top_ids + wanted, result.top_ids + row.params.num_logprobs, -1);
  std::fill(result.top_logprobs + wanted, result.top_logprobs + row.params.num_logprobs, kNegInf);
}

// Copies the row into the scratch, -inf for every id outside the mask. Whole words, which most are, go in one piece.
float* masked_row(const float* logits, int32_t vocab, const uint32_t* mask, SampleScratch& scratch) {
  float* out = scratch.masked.get();
  for (int32_t start = 0; start < vocab; start += 32) {
    const int32_t count = std::min(32, vocab - start);
    const uint32_t word = mask[start / 32];
    if (word == 0) {
      std::fill_n(out + start, count, kNegInf);
    } else if (word == 0xFFFFFFFFu) {
      std::copy_n(logits + start, count, out + start);
    } else {
      for (int32_t i = 0; i < count; ++i) out[start + i] = (word >> i & 1u) != 0 ? logits[start + i] : kNegInf;
    }
  }
  return out;
}

// The lowest id of a mask; 0 for an empty one.
int32_t first_allowed(const uint32_t* mask, int32_t vocab) {
  for (int32_t id = 0; id < vocab; ++id) {
    if ((mask[id / 32] >> (id % 32) & 1u) != 0) return id;
  }
  return 0;
}

bool has_penalty(const SampleParams& p) { return p.repetition != 1.0f || p.presence != 0.0f || p.frequency != 0.0f; }

// Adds biases and penalties to the row. Returns how many logits it changed; their old values are in the scratch.
int32_t adjust(const Row& row) {
  const SampleParams& p = row.params;
  SampleScratch& s = row.scratch;
  int32_t num_touched = 0;
  const auto touch = [&](int32_t id) {
    if (s.count[id] != 0) return;
    s.count[id] = kTouched;
    s.touched[num_touched] = id;
    s.original[num_touched++] = row.logits[id];
  };
  for (int32_t i = 0; i < p.num_bias; ++i) {
    const int32_t id = p.bias_ids[i];
    if (id < 0 || id >= row.vocab) continue;
    touch(id);
    row.logits[id] = clean(clean(row.logits[id]) + p.bias_values[i]);
  }
  const int32_t num_history = has_penalty(p) ? p.num_history : 0;
  for (int32_t i = 0; i < num_history; ++i) {
    const int32_t id = p.history[i];
    if (id < 0 || id >= row.vocab) continue;
    touch(id);
    s.count[id] |= kInHistory;
    if (i >= p.num_prompt) s.count[id] += kOneOutput;
  }
  for (int32_t i = 0; i < num_touched; ++i) {
    const int32_t id = s.touched[i], marks = s.count[id];
    s.count[id] = 0;
    if (!(marks & kInHistory)) continue;
    float x = clean(row.logits[id]);
    x = clean(x > 0.0f ? x / p.repetition : x * p.repetition);
    if (marks >= kOneOutput) x = clean(x - (p.presence + p.frequency * static_cast<float>(marks / kOneOutput)));
    row.logits[id] = x;
  }
  return num_touched;
}

void sample(const Passes& passes, float* logits, int32_t vocab, const SampleParams& params, SampleResult& result,
            SampleScratch& scratch) {
  const Row row{passes, logits, vocab, params, scratch};
  const bool has_logprobs = params.num_logprobs >= 0;
  const bool is_adjusted = params.num_bias > 0 || (has_penalty(params) && params.num_history > 0);
  float max = has_logprobs || (!is_adjusted && params.mask == nullptr) ? row_max(row) : kNegInf;
  const float raw_max = max;
  float log_total = 0.0f;
  if (has_logprobs && max > kNegInf) {
    log_total = sampling::log_pos(static_cast<float>(passes.sum_exp(logits, vocab, max, 1.0f)));
  }
  if (params.num_logprobs > 0) fill_top(row, max, log_total, result);

  if (params.mask != nullptr) {
    const Row masked{passes, masked_row(logits, vocab, params.mask, scratch), vocab, params, scratch};
    if (is_adjusted) adjust(masked);
    max = row_max(masked);
    result.token = max > kNegInf ? choose(masked, max) : first_allowed(params.mask, vocab);
  } else {
    const int32_t num_touched = is_adjusted ? adjust(row) : 0;
    if (num_touched > 0 || (is_adjusted && !has_logprobs)) max = row_max(row);
    result.token = choose(row, max);
    for (int32_t i = 0; i < num_touched; ++i) logits[scratch.touched[i]] = scratch.original[i];
  }

  result.logprob = std::numeric_limits<float>::quiet_NaN();
  if (has_logprobs) {
    result.logprob = raw_max > kNegInf ? (clean(logits[result.token]) - raw_max) - log_total : kNegInf;
  }
}

const Passes& best_passes() {
  const Passes* avx2 = sampling::avx2_passes();
  return avx2 ? *avx2 : sampling::scalar_passes();
}

size_t with_slack(int32_t n) { return static_cast<size_t>(n) + 8; }

}  // namespace

SampleScratch::SampleScratch(int32_t vocab)
    : max_vocab(vocab),
      group_max(new float[with_slack(num_groups(vocab))]),
      group_order(new float[with_slack(num_groups(vocab))]),
      scaled(new float[with_slack(vocab)]),
      weight(new float[with_slack(vocab)]),
      id(new int32_t[with_slack(vocab)]),
      chosen(new int32_t[with_slack(vocab)]),
      count(static_cast<int32_t*>(std::calloc(with_slack(vocab), sizeof(int32_t))), std::free),
      touched(new int32_t[with_slack(vocab)]),
      original(new float[with_slack(vocab)]),
      masked(new float[with_slack(vocab)]) {
  if (!count) throw std::bad_alloc();
}

void sample_row(float* logits, int32_t vocab, const SampleParams& params, SampleResult& result,
                SampleScratch& scratch) {
  sample(best_passes(), logits, vocab, params, result, scratch);
}

void sample_row_scalar(float* logits, int32_t vocab, const SampleParams& params, SampleResult& result,
                       SampleScratch& scratch) {
  sample(sampling::scalar_passes(), logits, vocab, params, result, scratch);
}

void gumbel_noise(uint64_t seed, uint32_t output_index, int32_t num_ids, float* noise) {
  best_passes().noise(seed, output_index, num_ids, noise);
}

void gumbel_noise_scalar(uint64_t seed, uint32_t output_index, int32_t num_ids, float* noise) {
  sampling::scalar_passes().noise(seed, output_index, num_ids, noise);
}

}  // namespace firstlight
