// Scalar twins of the vector maths in vector_x86.h: the same operations in the same order. Also float16 conversions.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace firstlight::scalar {

constexpr float kLog2e = 1.44269504088896341f;
constexpr float kLn2Hi = 0.693145751953125f;       // 15 bits: n * kLn2Hi is exact for |n| < 512
constexpr float kLn2Lo = 1.42860682030941723e-6f;  // ln 2 - kLn2Hi
constexpr float kExpLowest = -87.3f;               // below this the result is 0
constexpr float kExpHighest = 88.0f;
// exp(r) on [-ln2/2, ln2/2], least squares on Chebyshev points with the first two terms kept at 1: relative error 4e-9.
constexpr float kExpPoly[7] = {1.0f, 1.0f, 0.499999886f, 0.166665184f, 0.0416695345f, 0.00836892617f, 0.00137513824f};

inline float exp_f32(float x) {
  if (!(x >= kExpLowest)) return 0.0f;
  if (x > kExpHighest) x = kExpHighest;
  const float n = std::nearbyintf(x * kLog2e);
  float r = std::fmaf(-n, kLn2Hi, x);
  r = std::fmaf(-n, kLn2Lo, r);
  float p = kExpPoly[6];
  for (int i = 5; i >= 0; --i) p = std::fmaf(p, r, kExpPoly[i]);
  int32_t bits;
  std::memcpy(&bits, &p, 4);
  bits += static_cast<int32_t>(n) << 23;
  std::memcpy(&p, &bits, 4);
  return p;
}

// 1 - 2 / (exp(2x) + 1)
inline float tanh_f32(float x) { return 1.0f - 2.0f / (exp_f32(x + x) + 1.0f); }

inline float half_to_float(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  uint32_t exponent = (h >> 10) & 31u, mantissa = h & 0x3ffu, bits;
  if (exponent == 0) {
    if (mantissa == 0) {
      bits = sign;
    } else {
      exponent = 113;
      while ((mantissa & 0x400u) == 0) {
        mantissa <<= 1;
        --exponent;
      }
      bits = sign | (exponent << 23) | ((mantissa & 0x3ffu) << 13);
    }
  } else if (exponent == 31) {
    bits = sign | 0x7f800000u | (mantissa << 13) | (mantissa ? 0x400000u : 0u);
  } else {
    bits = sign | ((exponent + 112) << 23) | (mantissa << 13);
  }
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

// Rounds to nearest even. Takes finite values within the float16 range (see clamp_half).
inline uint16_t float_to_half(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const int exponent = static_cast<int>((bits >> 23) & 255u) - 112;
  uint32_t mantissa = bits & 0x7fffffu;
  if (exponent >= 31) return static_cast<uint16_t>(sign | 0x7c00u);
  if (exponent <= 0) {
    if (exponent < -10) return static_cast<uint16_t>(sign);
    mantissa |= 0x800000u;
    const uint32_t shift = static_cast<uint32_t>(14 - exponent);
    const uint32_t half = 1u << (shift - 1), rest = mantissa & ((1u << shift) - 1);
    uint32_t h = mantissa >> shift;
    if (rest > half || (rest == half && (h & 1u))) ++h;
    return static_cast<uint16_t>(sign | h);
  }
  uint32_t h = (static_cast<uint32_t>(exponent) << 10) | (mantissa >> 13);
  const uint32_t rest = mantissa & 0x1fffu;
  if (rest > 0x1000u || (rest == 0x1000u && (h & 1u))) ++h;
  return static_cast<uint16_t>(sign | h);
}

constexpr float kHalfMax = 65504.0f;
// What a KV slot may hold: finite, NaN becomes kHalfMax, so that a broken row can never reach a neighbour through 0 *
// NaN.
inline float clamp_half(float x) {
  const float low = x < kHalfMax ? x : kHalfMax;
  return low > -kHalfMax ? low : -kHalfMax;
}

// The sum of 8 lanes in the order that ops.h states.
inline float lane_sum(const float* s) { return ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7])); }

}  // namespace firstlight::scalar
