// Scalar passes of sampling: the oracle of the vector versions, and the fallback.
#include <algorithm>

#include "sampling_passes.h"

namespace firstlight::sampling {
namespace {

void group_max(const float* logits, int32_t vocab, float* groups) {
  std::fill(groups, groups + num_groups(vocab), kNegInf);
  for (int32_t i = 0; i < vocab; ++i) {
    float& group = groups[i / kGroupBlock * 8 + i % 8];
    group = std::max(group, clean(logits[i]));
  }
}

double sum_exp(const float* logits, int32_t vocab, float max, float inv_t) {
  double total = 0.0;
  for (int32_t start = 0; start < vocab; start += kChunk) {
    const int32_t end = std::min(vocab, start + kChunk);
    float lanes[kLanes] = {};
    for (int32_t i = start; i < end; ++i) lanes[i % kLanes] += exp_neg((clean(logits[i]) - max) * inv_t);
    total += add_lanes(lanes);
  }
  return total;
}

int32_t list_above(const float* logits, int32_t vocab, float max, float inv_t, float floor, float* scaled,
                   int32_t* id) {
  int32_t n = 0;
  for (int32_t i = 0; i < vocab; ++i) {
    const float s = (clean(logits[i]) - max) * inv_t;
    if (s < floor) continue;
    scaled[n] = s;
    id[n++] = i;
  }
  return n;
}

void exp_list(const float* x, int32_t n, float* out) {
  for (int32_t i = 0; i < n; ++i) out[i] = exp_neg(x[i]);
}

struct Words {
  uint32_t word[4];
};

Words philox(uint64_t seed, uint32_t c0, uint32_t c1) {
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32), c2 = 0, c3 = 0;
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t p0 = static_cast<uint64_t>(kPhiloxM0) * c0, p1 = static_cast<uint64_t>(kPhiloxM1) * c2;
    c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(p1);
    c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(p0);
    k0 += kPhiloxW0;
    k1 += kPhiloxW1;
  }
  return {{c0, c1, c2, c3}};
}

// -log(-log u) for u = 1 - (word + 1/2) / 2^32. u above one half is handled as 1 - q, so that -log u keeps its
// precision where it is small and g is large: there the winners are.
float gumbel(uint32_t word) {
  const int32_t bits = static_cast<int32_t>(word);
  const float q = std::fma(static_cast<float>(bits ^ (bits >> 31)), 0x1p-32f, 0x1p-33f);
  const float u = bits < 0 ? q : 1.0f - q;
  const int32_t u_bits = std::bit_cast<int32_t>(u);
  const int32_t k = (u_bits - kSqrtHalfBits) >> 23;
  const float f = k == 0 ? -q : std::bit_cast<float>(u_bits - (k << 23)) - 1.0f;
  return -log_pos(-log_sum(static_cast<float>(k), f));
}

// Noise of ids [block * 32, block * 32 + 32): the call with counter block * 8 + j gives ids j, j + 8, j + 16, j + 24 of
// them.
void noise_block(uint64_t seed, uint32_t output_index, int32_t block, float* noise) {
  for (int32_t j = 0; j < 8; ++j) {
    const Words words = philox(seed, static_cast<uint32_t>(block * 8 + j), output_index);
    for (int32_t w = 0; w < 4; ++w) noise[w * 8 + j] = gumbel(words.word[w]);
  }
}

int32_t noisy_argmax(const float* logits, int32_t vocab, float max, float inv_t, Cut cut, float floor, uint64_t seed,
                     uint32_t output_index) {
  float best = kNegInf;
  int32_t best_id = 0;
  for (int32_t start = 0; start < vocab; start += kLanes) {
    const int32_t end = std::min(vocab, start + kLanes);
    float scaled[kLanes];
    bool any = false;
    for (int32_t i = start; i < end; ++i) {
      const float x = clean(logits[i]), s = (x - max) * inv_t;
      const bool kept = (x > cut.logit || (x == cut.logit && i <= cut.id)) && s >= floor;
      scaled[i - start] = kept ? s : kNegInf;
      any |= kept;
    }
    if (!any) continue;
    float noise[kLanes];
    noise_block(seed, output_index, start / kLanes, noise);
    for (int32_t i = start; i < end; ++i) {
      const float score = scaled[i - start] + noise[i - start];
      if (score > best) {
        best = score;
        best_id = i;
      }
    }
  }
  return best_id;
}

void noise(uint64_t seed, uint32_t output_index, int32_t num_ids, float* noise) {
  for (int32_t start = 0; start < num_ids; start += kLanes) {
    float block[kLanes];
    noise_block(seed, output_index, start / kLanes, block);
    std::copy(block, block + std::min(kLanes, num_ids - start), noise + start);
  }
}

}  // namespace

const Passes& scalar_passes() {
  static constexpr Passes kPasses{group_max, sum_exp, list_above, exp_list, noisy_argmax, noise};
  return kPasses;
}

}  // namespace firstlight::sampling
