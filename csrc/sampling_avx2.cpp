// AVX2 passes of sampling: bit for bit what sampling_scalar.cpp computes, eight ids at a time.
#include "sampling_passes.h"

#if defined(__AVX2__) && defined(__FMA__)

#include <immintrin.h>

#include <algorithm>
#include <array>

namespace firstlight::sampling {
namespace {

struct Block {  // 32 ids
  __m256 v[4];
};

inline __m256 splat(float x) { return _mm256_set1_ps(x); }
inline __m256i splat(int32_t x) { return _mm256_set1_epi32(x); }
inline __m256i iota() { return _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7); }

// maxps and minps answer their second operand when one is NaN.
inline __m256 clean8(__m256 x) { return _mm256_min_ps(_mm256_max_ps(x, splat(kNegInf)), splat(FLT_MAX)); }

// The cleaned logits of ids [start, start + 32); -inf past the row.
inline Block load_block(const float* logits, int32_t vocab, int32_t start) {
  alignas(32) float tail[kLanes];
  const float* p = logits + start;
  if (vocab - start < kLanes) {
    std::fill(std::copy(p, logits + vocab, tail), tail + kLanes, kNegInf);
    p = tail;
  }
  Block block;
  for (int w = 0; w < 4; ++w) block.v[w] = clean8(_mm256_loadu_ps(p + w * 8));
  return block;
}

inline void scale_block(Block& block, __m256 max, __m256 inv_t) {
  for (int w = 0; w < 4; ++w) block.v[w] = _mm256_mul_ps(_mm256_sub_ps(block.v[w], max), inv_t);
}

inline __m256 exp_neg8(__m256 x) {
  const __m256 magic = splat(kRoundMagic);
  const __m256 n = _mm256_sub_ps(_mm256_fmadd_ps(x, splat(kLog2E), magic), magic);
  __m256 r = _mm256_fmadd_ps(n, splat(-kLn2Hi), x);
  r = _mm256_fmadd_ps(n, splat(-kLn2Lo), r);
  __m256 q = splat(kExp[4]);
  for (int i = 3; i >= 0; --i) q = _mm256_fmadd_ps(q, r, splat(kExp[i]));
  const __m256 e = _mm256_add_ps(_mm256_fmadd_ps(_mm256_mul_ps(r, r), q, r), splat(1.0f));
  const __m256i scaled = _mm256_add_epi32(_mm256_castps_si256(e), _mm256_slli_epi32(_mm256_cvttps_epi32(n), 23));
  return _mm256_and_ps(_mm256_castsi256_ps(scaled), _mm256_cmp_ps(x, splat(kExpFloor), _CMP_GE_OQ));
}

inline __m256 log_sum8(__m256 k, __m256 f) {
  const __m256 y = _mm256_mul_ps(f, f);
  __m256 p = splat(kLog[7]);
  for (int i = 6; i >= 0; --i) p = _mm256_fmadd_ps(p, f, splat(kLog[i]));
  __m256 r = _mm256_fmadd_ps(k, splat(kLn2Lo), _mm256_mul_ps(_mm256_mul_ps(y, f), p));
  r = _mm256_fmadd_ps(splat(-0.5f), y, r);
  return _mm256_fmadd_ps(k, splat(kLn2Hi), _mm256_add_ps(f, r));
}

// x = 2^k (1 + f) for normal positive x.
inline __m256 split8(__m256 x, __m256i& k) {
  const __m256i bits = _mm256_castps_si256(x);
  k = _mm256_srai_epi32(_mm256_sub_epi32(bits, splat(kSqrtHalfBits)), 23);
  return _mm256_sub_ps(_mm256_castsi256_ps(_mm256_sub_epi32(bits, _mm256_slli_epi32(k, 23))), splat(1.0f));
}

inline __m256 negate8(__m256 x) { return _mm256_xor_ps(x, splat(-0.0f)); }

// q of gumbel(): the distance of the word's u from the nearer end of (0, 1).
inline __m256 distance8(__m256i word) {
  const __m256i folded = _mm256_xor_si256(word, _mm256_srai_epi32(word, 31));
  return _mm256_fmadd_ps(_mm256_cvtepi32_ps(folded), splat(0x1p-32f), splat(0x1p-33f));
}

inline __m256 gumbel8(__m256i word, __m256 q) {
  const __m256 u = _mm256_blendv_ps(_mm256_sub_ps(splat(1.0f), q), q, _mm256_castsi256_ps(word));
  __m256i k;
  __m256 f = split8(u, k);
  f = _mm256_blendv_ps(f, negate8(q), _mm256_castsi256_ps(_mm256_cmpeq_epi32(k, _mm256_setzero_si256())));
  const __m256 e = negate8(log_sum8(_mm256_cvtepi32_ps(k), f));
  const __m256 g = split8(e, k);
  return negate8(log_sum8(_mm256_cvtepi32_ps(k), g));
}

// At least the noise, for the price of an exponent: -log u >= q for u above one half, so g <= -log q < -ln2 *
// exponent(q); for u below, g <= -log(ln 2).
inline __m256 noise_bound8(__m256i word, __m256 q) {
  const __m256i exponent = _mm256_sub_epi32(splat(127), _mm256_srli_epi32(_mm256_castps_si256(q), 23));
  const __m256 bound = _mm256_fmadd_ps(_mm256_cvtepi32_ps(exponent), splat(0.693148f), splat(1e-4f));
  return _mm256_blendv_ps(bound, splat(0.3666f), _mm256_castsi256_ps(word));
}

// Philox4x32-10 for 8 counters at once. Each 32-bit value sits in the low half of a 64-bit lane, so that a product is
// one instruction; what gathers in the high half never reaches a low one.
class Philox {
 public:
  Philox(uint64_t seed, uint32_t output_index) : index_(_mm256_set1_epi64x(output_index)) {
    uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
    for (int round = 0; round < kPhiloxRounds; ++round) {
      key_[round][0] = _mm256_set1_epi64x(k0);
      key_[round][1] = _mm256_set1_epi64x(k1);
      k0 += kPhiloxW0;
      k1 += kPhiloxW1;
    }
  }

  // word[w] lane j is the noise word of id block * 32 + w * 8 + j.
  void block(int32_t block, __m256i word[4]) const {
    const __m256i low = splat(block * 8);
    Lanes even, odd;  // counters 0 2 4 6 and 1 3 5 7
    even.c[0] = _mm256_add_epi32(low, _mm256_setr_epi32(0, 0, 2, 0, 4, 0, 6, 0));
    odd.c[0] = _mm256_add_epi32(low, _mm256_setr_epi32(1, 0, 3, 0, 5, 0, 7, 0));
    even.c[1] = odd.c[1] = index_;
    even.c[2] = even.c[3] = odd.c[2] = odd.c[3] = _mm256_setzero_si256();
    for (int round = 0; round < kPhiloxRounds; ++round) {
      turn(even, key_[round]);
      turn(odd, key_[round]);
    }
    for (int w = 0; w < 4; ++w) word[w] = _mm256_blend_epi32(even.c[w], _mm256_slli_epi64(odd.c[w], 32), 0xAA);
  }

 private:
  struct Lanes {
    __m256i c[4];
  };

  static void turn(Lanes& x, const __m256i key[2]) {
    const __m256i p0 = _mm256_mul_epu32(x.c[0], _mm256_set1_epi64x(kPhiloxM0));
    const __m256i p1 = _mm256_mul_epu32(x.c[2], _mm256_set1_epi64x(kPhiloxM1));
    x.c[0] = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(p1, 32), x.c[1]), key[0]);
    x.c[2] = _mm256_xor_si256(_mm256_xor_si256(_mm256_srli_epi64(p0, 32), x.c[3]), key[1]);
    x.c[1] = p1;
    x.c[3] = p0;
  }

  __m256i index_;
  __m256i key_[kPhiloxRounds][2];
};

void group_max(const float* logits, int32_t vocab, float* groups) {
  for (int32_t start = 0; start < vocab; start += kGroupBlock, groups += 8) {
    __m256 acc[4] = {splat(kNegInf), splat(kNegInf), splat(kNegInf), splat(kNegInf)};
    if (vocab - start >= kGroupBlock) {
      for (int32_t i = 0; i < kGroupBlock; i += kLanes) {
        for (int w = 0; w < 4; ++w) acc[w] = _mm256_max_ps(_mm256_loadu_ps(logits + start + i + w * 8), acc[w]);
      }
    } else {
      for (int32_t i = start; i < vocab; i += kLanes) {
        const Block block = load_block(logits, vocab, i);
        for (int w = 0; w < 4; ++w) acc[w] = _mm256_max_ps(block.v[w], acc[w]);
      }
    }
    const __m256 best = _mm256_max_ps(_mm256_max_ps(acc[0], acc[1]), _mm256_max_ps(acc[2], acc[3]));
    _mm256_storeu_ps(groups, _mm256_min_ps(best, splat(FLT_MAX)));
  }
}

double sum_exp(const float* logits, int32_t vocab, float max, float inv_t) {
  double total = 0.0;
  for (int32_t start = 0; start < vocab; start += kChunk) {
    const int32_t end = std::min(vocab, start + kChunk);
    __m256 acc[4] = {_mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps()};
    for (int32_t i = start; i < end; i += kLanes) {
      Block block = load_block(logits, vocab, i);
      scale_block(block, splat(max), splat(inv_t));
      for (int w = 0; w < 4; ++w) acc[w] = _mm256_add_ps(acc[w], exp_neg8(block.v[w]));
    }
    alignas(32) float lanes[kLanes];
    for (int w = 0; w < 4; ++w) _mm256_store_ps(lanes + w * 8, acc[w]);
    total += add_lanes(lanes);
  }
  return total;
}

// For each mask of 8 lanes: the lanes that are set, then zeros.
constexpr std::array<std::array<uint8_t, 8>, 256> make_pack_table() {
  std::array<std::array<uint8_t, 8>, 256> table{};
  for (size_t mask = 0; mask < 256; ++mask) {
    size_t n = 0;
    for (uint8_t lane = 0; lane < 8; ++lane) {
      if (mask >> lane & 1) table[mask][n++] = lane;
    }
  }
  return table;
}
alignas(64) constexpr auto kPack = make_pack_table();

int32_t list_above(const float* logits, int32_t vocab, float max, float inv_t, float floor, float* scaled,
                   int32_t* id) {
  int32_t n = 0;
  for (int32_t start = 0; start < vocab; start += kLanes) {
    Block block = load_block(logits, vocab, start);
    scale_block(block, splat(max), splat(inv_t));
    const __m256 best = _mm256_max_ps(_mm256_max_ps(block.v[0], block.v[1]), _mm256_max_ps(block.v[2], block.v[3]));
    if (_mm256_movemask_ps(_mm256_cmp_ps(best, splat(floor), _CMP_GE_OQ)) == 0) continue;
    for (int w = 0; w < 4; ++w) {
      const unsigned mask =
          static_cast<unsigned>(_mm256_movemask_ps(_mm256_cmp_ps(block.v[w], splat(floor), _CMP_GE_OQ)));
      const __m256i order = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(kPack[mask].data())));
      _mm256_storeu_ps(scaled + n, _mm256_permutevar8x32_ps(block.v[w], order));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(id + n), _mm256_add_epi32(order, splat(start + w * 8)));
      n += std::popcount(mask);
    }
  }
  return n;
}

void exp_list(const float* x, int32_t n, float* out) {
  int32_t i = 0;
  for (; i + 8 <= n; i += 8) _mm256_storeu_ps(out + i, exp_neg8(_mm256_loadu_ps(x + i)));
  for (; i < n; ++i) out[i] = exp_neg(x[i]);
}

// Noise is computed only where it could matter: a block whose best term plus the largest noise does not beat the best
// score so far is skipped, then a vector by the noise's bound. Scores that tie an earlier one lose, so neither changes
// the answer.
int32_t noisy_argmax(const float* logits, int32_t vocab, float max, float inv_t, Cut cut, float floor, uint64_t seed,
                     uint32_t output_index) {
  const Philox philox(seed, output_index);
  float best = kNegInf;
  int32_t best_id = 0;
  for (int32_t start = 0; start < vocab; start += kLanes) {
    const Block row = load_block(logits, vocab, start);
    Block term = row;
    scale_block(term, splat(max), splat(inv_t));
    __m256 top = splat(kNegInf);
    for (int w = 0; w < 4; ++w) {
      const __m256i id = _mm256_add_epi32(iota(), splat(start + w * 8));
      const __m256 within = _mm256_andnot_ps(_mm256_castsi256_ps(_mm256_cmpgt_epi32(id, splat(cut.id))),
                                             _mm256_cmp_ps(row.v[w], splat(cut.logit), _CMP_EQ_OQ));
      const __m256 inside = _mm256_or_ps(within, _mm256_cmp_ps(row.v[w], splat(cut.logit), _CMP_GT_OQ));
      const __m256 kept = _mm256_and_ps(inside, _mm256_cmp_ps(term.v[w], splat(floor), _CMP_GE_OQ));
      term.v[w] = _mm256_blendv_ps(splat(kNegInf), term.v[w], kept);
      top = _mm256_max_ps(top, term.v[w]);
    }
    const __m256 reach = _mm256_add_ps(top, splat(kMaxNoise));
    if (_mm256_movemask_ps(_mm256_cmp_ps(reach, splat(best), _CMP_GT_OQ)) == 0) continue;

    __m256i word[4];
    philox.block(start / kLanes, word);
    for (int w = 0; w < 4; ++w) {
      const __m256 q = distance8(word[w]);
      const __m256 bound = _mm256_add_ps(term.v[w], noise_bound8(word[w], q));
      if (_mm256_movemask_ps(_mm256_cmp_ps(bound, splat(best), _CMP_GT_OQ)) == 0) continue;
      alignas(32) float score[8];
      _mm256_store_ps(score, _mm256_add_ps(term.v[w], gumbel8(word[w], q)));
      for (int32_t j = 0; j < 8; ++j) {
        if (score[j] > best) {
          best = score[j];
          best_id = start + w * 8 + j;
        }
      }
    }
  }
  return best_id;
}

void noise(uint64_t seed, uint32_t output_index, int32_t num_ids, float* noise) {
  const Philox philox(seed, output_index);
  for (int32_t start = 0; start < num_ids; start += kLanes) {
    __m256i word[4];
    philox.block(start / kLanes, word);
    alignas(32) float block[kLanes];
    for (int w = 0; w < 4; ++w) _mm256_store_ps(block + w * 8, gumbel8(word[w], distance8(word[w])));
    std::copy(block, block + std::min(kLanes, num_ids - start), noise + start);
  }
}

}  // namespace

const Passes* avx2_passes() {
  static constexpr Passes kPasses{group_max, sum_exp, list_above, exp_list, noisy_argmax, noise};
  static const bool is_supported = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  return is_supported ? &kPasses : nullptr;
}

}  // namespace firstlight::sampling

#else

namespace firstlight::sampling {
const Passes* avx2_passes() { return nullptr; }
}  // namespace firstlight::sampling

#endif
