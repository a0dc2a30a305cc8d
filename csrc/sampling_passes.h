// Inside sampling: the passes over a row that have a scalar and an AVX2 version, and the arithmetic both share.
//
// Functions here are static so that each translation unit keeps its own copy: one compiled for AVX2 must not be linked
// into the fallback.
#pragma once

#include <bit>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <limits>

namespace firstlight::sampling {

constexpr float kNegInf = -std::numeric_limits<float>::infinity();
constexpr int32_t kLanes = 32;        // accumulators of a sum over the row, and ids that share 8 Philox calls
constexpr int32_t kChunk = 4096;      // ids summed in float before the lanes go to double
constexpr int32_t kGroupBlock = 256;  // ids in 8 groups: group = (id / 256) * 8 + id % 8, 32 ids each
constexpr float kMaxNoise = 22.9f;    // above every value of the noise (22.87)

static inline int32_t num_groups(int32_t vocab) { return (vocab + kGroupBlock - 1) / kGroupBlock * 8; }

// Polynomials: least maximum relative error, fitted by us (iteratively reweighted least squares in Chebyshev form) over
// the reduced range. exp: e^r = 1 + r + r^2 Q(r), |r| <= ln2 / 2, error 3e-9. log: log(1+f) = f - f^2/2 + f^3 P(f),
// sqrt(1/2) <= 1+f < sqrt(2), error 6e-9. Both before rounding.
constexpr float kExp[5] = {0.5f, 0.166665181517601f, 0.04166620597243309f, 0.008368953131139278f,
                           0.0013950602151453495f};
constexpr float kLog[8] = {0.3333333134651184f,  -0.2500081956386566f,  0.20001226663589478f, -0.16623356938362122f,
                           0.14201757311820984f, -0.13160182535648346f, 0.127615824341774f,   -0.07634500414133072f};
constexpr float kLog2E = 1.44269504f;
constexpr float kLn2Hi = 0.693145752f;      // 0x1.62e4p-1: few enough bits that k * kLn2Hi is exact
constexpr float kLn2Lo = 1.42860682e-06f;   // ln2 - kLn2Hi
constexpr float kRoundMagic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
constexpr float kExpFloor = -86.0f;         // below it exp is 0: the result would leave the normal floats
constexpr int32_t kSqrtHalfBits = 0x3f3504f3;

constexpr uint32_t kPhiloxM0 = 0xD2511F53u, kPhiloxM1 = 0xCD9E8D57u;  // Salmon et al. 2011, "Parallel random numbers"
constexpr uint32_t kPhiloxW0 = 0x9E3779B9u, kPhiloxW1 = 0xBB67AE85u;
constexpr int kPhiloxRounds = 10;

static inline float clean(float x) {
  x = x > kNegInf ? x : kNegInf;  // false for NaN
  return x < FLT_MAX ? x : FLT_MAX;
}

// exp(x) for x <= 0.
static inline float exp_neg(float x) {
  if (!(x >= kExpFloor)) return 0.0f;
  const float shifted = std::fma(x, kLog2E, kRoundMagic);
  const float n = shifted - kRoundMagic;
  float r = std::fma(n, -kLn2Hi, x);
  r = std::fma(n, -kLn2Lo, r);
  float q = kExp[4];
  for (int i = 3; i >= 0; --i) q = std::fma(q, r, kExp[i]);
  const float e = std::fma(r * r, q, r) + 1.0f;
  return std::bit_cast<float>(std::bit_cast<int32_t>(e) + (static_cast<int32_t>(n) << 23));
}

// log(2^k (1 + f)).
static inline float log_sum(float k, float f) {
  const float y = f * f;
  float p = kLog[7];
  for (int i = 6; i >= 0; --i) p = std::fma(p, f, kLog[i]);
  float r = std::fma(k, kLn2Lo, (y * f) * p);
  r = std::fma(-0.5f, y, r);
  return std::fma(k, kLn2Hi, f + r);
}

// log(x) for normal positive x.
static inline float log_pos(float x) {
  const int32_t bits = std::bit_cast<int32_t>(x);
  const int32_t k = (bits - kSqrtHalfBits) >> 23;
  return log_sum(static_cast<float>(k), std::bit_cast<float>(bits - (k << 23)) - 1.0f);
}

// Adds the lanes of one chunk in lane order.
static inline double add_lanes(const float* lanes) {
  double sum = 0.0;
  for (int32_t i = 0; i < kLanes; ++i) sum += static_cast<double>(lanes[i]);
  return sum;
}

// What a row keeps after top_k and top_p: logits above `logit`, and those equal to it up to id `id`.
struct Cut {
  float logit = kNegInf;
  int32_t id = INT32_MAX;
};

struct Passes {
  // The largest cleaned logit of each group ([num_groups]; -inf for a group with none).
  void (*group_max)(const float* logits, int32_t vocab, float* groups);

  // Sum over the row of exp((logit - max) * inv_t).
  double (*sum_exp)(const float* logits, int32_t vocab, float max, float inv_t);

  // Lists, ids ascending, the tokens whose (logit - max) * inv_t is at least `floor` (finite). Returns how many; may
  // write 8 entries past them.
  int32_t (*list_above)(const float* logits, int32_t vocab, float max, float inv_t, float floor, float* scaled,
                        int32_t* id);

  // out[i] = exp(x[i]), x <= 0. May be in place.
  void (*exp_list)(const float* x, int32_t n, float* out);

  // The id with the largest (logit - max) * inv_t + noise among those inside `cut` whose first term is at least
  // `floor`; lowest id on ties. `max` is finite and the row's largest.
  int32_t (*noisy_argmax)(const float* logits, int32_t vocab, float max, float inv_t, Cut cut, float floor,
                          uint64_t seed, uint32_t output_index);

  // Noise of ids [0, num_ids).
  void (*noise)(uint64_t seed, uint32_t output_index, int32_t num_ids, float* noise);
};

const Passes& scalar_passes();
const Passes* avx2_passes();  // null when this build or this machine has no AVX2 and FMA

}  // namespace firstlight::sampling
