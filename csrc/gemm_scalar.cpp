// Scalar matrix products: the oracle and the fallback. Reads like the definition in gemm.h.
#include <cmath>
#include <cstring>

#include "gemm.h"
#include "math_scalar.h"

namespace firstlight::scalar {
namespace {

float scale_at(const Weight& w, const uint8_t* p, int slot, int lane) {
  if (w.scale_f32) {
    float f;
    std::memcpy(&f, p + slot * 32 + lane * 4, 4);
    return f;
  }
  uint16_t h;
  std::memcpy(&h, p + slot * 16 + lane * 2, 2);
  return half_to_float(h);
}

// One activation row inside its tile of T rows.
struct RowView {
  const Activations& a;
  int start, size, t;

  RowView(const Activations& acts, int row) : a(acts) {
    const int tile = a.tile_of(row);
    start = a.tile_start(tile);
    size = a.tile_start(tile + 1) - start;
    t = row - start;
  }
  template <typename Q>
  const Q* q(int g) const {
    return static_cast<const Q*>(a.q) + static_cast<size_t>(start) * static_cast<size_t>(a.cols) + (g * size + t) * 32;
  }
  float scale(int g) const { return a.scale[start * (a.cols / 32) + g * size + t]; }
  float sum8(int g) const { return a.sums[start * (a.cols / 32) + g * size + t]; }
  float sum16(int g, int h) const { return a.sums[start * (a.cols / 32) * 2 + (g * 2 + h) * size + t]; }
  float x(int k) const {
    return static_cast<const float*>(
        a.q)[static_cast<size_t>(start) * static_cast<size_t>(a.cols) + static_cast<size_t>(k * size + t)];
  }
};

float nibble_dot(const Weight& w, const uint8_t* p, int lane, const RowView& v) {
  float acc = 0.0f;
  for (int g = 0; g < w.groups(); ++g, p += w.record_bytes()) {
    const uint8_t* codes = p + (w.scale_f32 ? 64 : 32);
    const int8_t* q = v.q<int8_t>(g);
    int sum = 0;
    for (int k = 0; k < 32; ++k) {
      const uint8_t c = codes[((k % 16) / 4) * 32 + lane * 4 + k % 4];
      sum += (k < 16 ? c & 15 : c >> 4) * q[k];
    }
    acc = std::fmaf(scale_at(w, p, 0, lane) * v.scale(g), static_cast<float>(sum), acc);
    acc = std::fmaf(scale_at(w, p, 1, lane), v.sum8(g), acc);
  }
  return acc;
}

float byte_dot(const Weight& w, const uint8_t* p, int lane, const RowView& v) {
  const int halves = 32 / w.group;
  const int scale_bytes = (w.scale_f32 ? 32 : 16) * halves * (w.has_min ? 2 : 1);
  float acc = 0.0f;
  for (int g = 0; g < w.groups(); ++g, p += w.record_bytes()) {
    const int16_t* q = v.q<int16_t>(g);
    for (int h = 0; h < halves; ++h) {
      int sum = 0;
      for (int k = h * w.group; k < (h + 1) * w.group; ++k) {
        sum += static_cast<int8_t>(p[scale_bytes + (k / 2) * 16 + lane * 2 + k % 2]) * q[k];
      }
      acc = std::fmaf(scale_at(w, p, h, lane) * v.scale(g), static_cast<float>(sum), acc);
      if (w.has_min) {
        const float s = halves == 2 ? v.sum16(g, h) : v.sum16(g, 0) + v.sum16(g, 1);
        acc = std::fmaf(scale_at(w, p, halves + h, lane), s, acc);
      }
    }
  }
  return acc;
}

float float_dot(const Weight& w, const uint8_t* p, int lane, const RowView& v) {
  float acc = 0.0f;
  for (int k = 0; k < w.cols; ++k, p += w.record_bytes()) {
    float value;
    if (w.kind == LayoutKind::kFloat) {
      std::memcpy(&value, p + 4 * lane, 4);
    } else {
      uint16_t h;
      std::memcpy(&h, p + 2 * lane, 2);
      if (w.kind == LayoutKind::kHalf) {
        value = half_to_float(h);
      } else {
        const uint32_t bits = static_cast<uint32_t>(h) << 16;
        std::memcpy(&value, &bits, 4);
      }
    }
    acc = std::fmaf(value, v.x(k), acc);
  }
  return acc;
}

}  // namespace

void gemm(const Weight& w, const Activations& a, const float* bias, bool accumulate, float* y, size_t ldy, int rb0,
          int rb1, uint8_t* /*scratch*/) {
  for (int row = 0; row < a.num_rows; ++row) {
    const RowView v(a, row);
    for (int r = rb0 * 8; r < rb1 * 8 && r < w.rows; ++r) {
      const uint8_t* p = w.data + static_cast<size_t>(r / 8) * w.row_block_bytes();
      float acc = w.kind == LayoutKind::kNibble ? nibble_dot(w, p, r % 8, v)
                  : w.kind == LayoutKind::kByte ? byte_dot(w, p, r % 8, v)
                                                : float_dot(w, p, r % 8, v);
      if (bias) acc += bias[r];
      float& out = y[static_cast<size_t>(row) * ldy + static_cast<size_t>(r)];
      out = accumulate ? out + acc : acc;
    }
  }
}

void quantise(const float* x, const Activations& a, int row, int begin, int end) {
  const int tile = a.tile_of(row), start = a.tile_start(tile), size = a.tile_start(tile + 1) - start, t = row - start;
  const int groups = a.cols / 32;
  const size_t base = static_cast<size_t>(start) * static_cast<size_t>(a.cols);
  if (a.kind == ActKind::kFloat) {
    float* q = static_cast<float*>(a.q) + base;
    for (int k = 0; k < a.cols; ++k) q[k * size + t] = x[k];
    return;
  }
  const float top = a.kind == ActKind::kInt8 ? 127.0f : 32767.0f;
  x += 32 * begin;
  for (int g = begin; g < end; ++g, x += 32) {
    float max = 0.0f;
    for (int k = 0; k < 32; ++k) max = std::fabs(x[k]) > max ? std::fabs(x[k]) : max;
    const bool is_zero = !(max >= kSmallestMax);
    const float d = is_zero ? 0.0f : max / top, id = is_zero ? 0.0f : top / max;
    int sum[2] = {0, 0};
    for (int k = 0; k < 32; ++k) {
      const float scaled = x[k] * id;
      const int v =
          std::fabs(scaled) <= top + 0.25f ? static_cast<int>(std::nearbyintf(scaled)) : -static_cast<int>(top) - 1;
      sum[k / 16] += v;
      if (a.kind == ActKind::kInt8) {
        (static_cast<int8_t*>(a.q) + base)[(g * size + t) * 32 + k] = static_cast<int8_t>(v);
      } else {
        (static_cast<int16_t*>(a.q) + base)[(g * size + t) * 32 + k] = static_cast<int16_t>(v);
      }
    }
    a.scale[start * groups + g * size + t] = d;
    if (a.kind == ActKind::kInt8) {
      a.sums[start * groups + g * size + t] = d * static_cast<float>(sum[0] + sum[1]);
    } else {
      for (int h = 0; h < 2; ++h) a.sums[start * groups * 2 + (g * 2 + h) * size + t] = d * static_cast<float>(sum[h]);
    }
  }
}

}  // namespace firstlight::scalar
