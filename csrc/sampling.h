// Sampling one token from one row of logits: filters, penalties, log-probabilities, seeded noise.
//
// Steps, in this order:
//   1. clean        NaN reads as -inf, +inf as the largest float. Whatever leaves the float range later is cleaned
//   again.
//   2. logprobs     natural log of softmax of the row as given, before any of the steps below.
//   2a. mask        an id whose bit is not set reads as -inf from here on.
//   3. logit_bias   added; an id listed twice gets both.
//   4. repetition   every id of `history`, once: a positive logit is divided by it, any other multiplied.
//   5. presence, frequency   ids of history[num_prompt:]: logit - (presence + frequency * count).
//   6. temperature 0 (or anything not above 0): the largest logit, lowest id on ties. Otherwise:
//   7. top_k        the k largest; off at 0, below 0 and from `vocab` on.
//   8. top_p        over what top_k left, renormalised: the fewest largest whose probabilities reach top_p, at least
//   one.
//   9. min_p        of what is left, every id with probability >= min_p * the largest. Off at 0.
//  10. noise        the kept id with the largest logit / temperature + g(seed, output_index, id).
// top_k and top_p order by larger logit, then lower id, so each keeps a prefix of one order and ties have one answer.
//
// g is Gumbel noise, -log(-log u), with u one 32-bit word of Philox4x32-10 (key: the seed; counter: the id's place and
// output_index). It is a function of (seed, output_index, id) alone, so a drafter with the same seed agrees often. u
// steps by 2^-32: g ends at 22.87, so a token less likely than about 1e-10 is less likely still.
//
// A row with no finite logit gives token 0, or with a mask the lowest id of the mask; its logprob, and each rival's, is
// -inf when the row as given had none. A masked row is worked on in a copy: the mask costs one pass, and a row without
// one takes the very road it took before there were masks.
//
// The AVX2 path and the scalar path give the same token and the same bits of every logprob: both use the polynomials
// and the order of operations in sampling_passes.h. Sums over the row run in 32 lanes (lane = id % 32), over chunks of
// 4096 ids whose lanes are then added in lane order, in double.
#pragma once

#include <cstdint>
#include <memory>

namespace firstlight {

struct SampleParams {
  float temperature = 1.0f;
  float top_p = 1.0f;
  float min_p = 0.0f;
  float presence = 0.0f;
  float frequency = 0.0f;
  float repetition = 1.0f;
  int32_t top_k = 0;
  uint64_t seed = 0;
  uint32_t output_index = 0;
  int32_t num_logprobs = -1;  // -1: none; 0: the sampled token's; n: also the n best of the row
  const int32_t* bias_ids = nullptr;
  const float* bias_values = nullptr;
  int32_t num_bias = 0;
  const int32_t* history = nullptr;  // read only when a penalty is on
  int32_t num_history = 0;
  int32_t num_prompt = 0;
  const uint32_t* mask = nullptr;  // [mask_words(vocab)]: bit id % 32 of word id / 32 is set for an allowed id
};

constexpr int32_t mask_words(int32_t vocab) { return (vocab + 31) / 32; }

// `logprob` is NaN when num_logprobs is -1. `top_ids` and `top_logprobs` are the caller's, num_logprobs entries each,
// best first (equal logits: lower id first); entries past the vocabulary get id -1 and -inf.
struct SampleResult {
  int32_t token = 0;
  float logprob = 0.0f;
  int32_t* top_ids = nullptr;
  float* top_logprobs = nullptr;
};

// Working memory for rows of up to `max_vocab` logits: one per thread that samples, made once. 32 bytes per id, of
// which a page is touched only when a row needs it (greedy and plain temperature need 8 KB for 49152 ids).
class SampleScratch {
 public:
  explicit SampleScratch(int32_t max_vocab);

  int32_t max_vocab;
  std::unique_ptr<float[]> group_max;                 // [num_groups] largest logit of each group
  std::unique_ptr<float[]> group_order;               // [num_groups] the same, reordered by selection
  std::unique_ptr<float[]> scaled;                    // [max_vocab + 8] candidates: (logit - max) / temperature
  std::unique_ptr<float[]> weight;                    // [max_vocab + 8] candidates: what selection adds up
  std::unique_ptr<int32_t[]> id;                      // [max_vocab + 8] candidates: ids, ascending
  std::unique_ptr<int32_t[]> chosen;                  // [max_vocab] candidates' indices that selection still looks at
  std::unique_ptr<int32_t[], void (*)(void*)> count;  // [max_vocab] per id: bit 0 touched, bit 1 in history, rest
                                                      // output count; all zero between calls
  std::unique_ptr<int32_t[]> touched;                 // [max_vocab] ids whose logit a bias or a penalty changed
  std::unique_ptr<float[]> original;                  // [max_vocab] what those logits were
  std::unique_ptr<float[]> masked;                    // [max_vocab + 8] the row of a sample with a mask
};

// Samples one row. Reads logits[0, vocab), vocab in 1..scratch.max_vocab; writes to it while it works and restores it
// to the bit. Ids of `history` and `bias_ids` outside the vocabulary are skipped. Safe from several threads, each with
// its own row and scratch. No heap, no exceptions, no global state.
void sample_row(float* logits, int32_t vocab, const SampleParams& params, SampleResult& result, SampleScratch& scratch);

// The same by the scalar path: the oracle, and the fallback where there is no AVX2.
void sample_row_scalar(float* logits, int32_t vocab, const SampleParams& params, SampleResult& result,
                       SampleScratch& scratch);

// Writes g(seed, output_index, id) for ids [0, num_ids) to `noise`.
void gumbel_noise(uint64_t seed, uint32_t output_index, int32_t num_ids, float* noise);
void gumbel_noise_scalar(uint64_t seed, uint32_t output_index, int32_t num_ids, float* noise);

}  // namespace firstlight
