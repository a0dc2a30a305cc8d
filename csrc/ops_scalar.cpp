// Scalar row kernels: the oracle and the fallback.
#include <cmath>
#include <cstring>

#include "math_scalar.h"
#include "ops.h"

namespace firstlight::scalar {
namespace {

float half_at(const uint8_t* p, int i) {
  uint16_t h;
  std::memcpy(&h, p + 2 * i, 2);
  return half_to_float(h);
}

float scale_at(const uint8_t* p, int i, bool f32) {
  if (!f32) return half_at(p, i);
  float f;
  std::memcpy(&f, p + 4 * i, 4);
  return f;
}

float gate_value(GatedKind kind, float x) {
  switch (kind) {
    case GatedKind::kSilu:
      return x / (1.0f + exp_f32(0.0f - x));
    case GatedKind::kGeluTanh: {
      const float inner = 0.797884560802865f * std::fmaf(0.044715f * x * x, x, x);
      return 0.5f * x * (1.0f + tanh_f32(inner));
    }
    default:
      return 0.5f * x * (1.0f + std::erf(x * 0.707106781186548f));
  }
}

}  // namespace

void rms_norm(const float* x, const float* weight, float eps, int n, float* out) {
  float lanes[8] = {};
  for (int i = 0; i < n; ++i) lanes[i % 8] = std::fmaf(x[i], x[i], lanes[i % 8]);
  const float inv = 1.0f / std::sqrt(lane_sum(lanes) / static_cast<float>(n) + eps);
  for (int i = 0; i < n; ++i) out[i] = x[i] * inv * weight[i];
}

void gated(GatedKind kind, const float* gate, const float* up, int n, float* out) {
  for (int i = 0; i < n; ++i) out[i] = gate_value(kind, gate[i]) * up[i];
}

void rope(float* x, int num_heads, int head_dim, int rotary_dim, bool interleaved, const float* cos, const float* sin) {
  const int half = rotary_dim / 2;
  for (int h = 0; h < num_heads; ++h, x += head_dim) {
    for (int i = 0; i < half; ++i) {
      float* a = interleaved ? x + 2 * i : x + i;
      float* b = interleaved ? a + 1 : a + half;
      const float va = *a, vb = *b;
      *a = std::fmaf(va, cos[i], -(vb * sin[i]));
      *b = std::fmaf(vb, cos[i], va * sin[i]);
    }
  }
}

void soft_cap(float* x, float cap, int n) {
  for (int i = 0; i < n; ++i) x[i] = cap * tanh_f32(x[i] / cap);
}

void add(const float* x, const float* y, int n, float* out) {
  for (int i = 0; i < n; ++i) out[i] = x[i] + y[i];
}

void scale(const float* x, float s, int n, float* out) {
  for (int i = 0; i < n; ++i) out[i] = x[i] * s;
}

void dequantise_row(const Weight& w, int row, float* out) {
  const uint8_t* block = w.data + static_cast<size_t>(row / 8) * w.row_block_bytes();
  const int lane = row % 8;
  const size_t record = w.record_bytes(), scale_bytes = w.scale_f32 ? 32 : 16;
  if (w.kind == LayoutKind::kNibble) {
    for (int g = 0; g < w.groups(); ++g, block += record, out += 32) {
      const float s = scale_at(block, lane, w.scale_f32), m = scale_at(block + scale_bytes, lane, w.scale_f32);
      const uint8_t* codes = block + 2 * scale_bytes;
      for (int k = 0; k < 16; ++k) {
        const uint8_t c = codes[(k / 4) * 32 + lane * 4 + k % 4];
        out[k] = std::fmaf(s, static_cast<float>(c & 15), m);
        out[k + 16] = std::fmaf(s, static_cast<float>(c >> 4), m);
      }
    }
  } else if (w.kind == LayoutKind::kByte) {
    const int halves = 32 / w.group;
    const uint8_t* codes = block + scale_bytes * static_cast<size_t>(halves * (w.has_min ? 2 : 1));
    for (int g = 0; g < w.groups(); ++g, block += record, codes += record, out += 32) {
      for (int k = 0; k < 32; ++k) {
        const int h = k / w.group;
        const float s = scale_at(block + static_cast<size_t>(h) * scale_bytes, lane, w.scale_f32);
        const float m =
            w.has_min ? scale_at(block + static_cast<size_t>(halves + h) * scale_bytes, lane, w.scale_f32) : 0.0f;
        out[k] = std::fmaf(s, static_cast<float>(static_cast<int8_t>(codes[(k / 2) * 16 + lane * 2 + k % 2])), m);
      }
    }
  } else {
    for (int k = 0; k < w.cols; ++k, block += record) {
      if (w.kind == LayoutKind::kFloat) {
        std::memcpy(out + k, block + 4 * lane, 4);
      } else if (w.kind == LayoutKind::kHalf) {
        out[k] = half_at(block, lane);
      } else {
        uint16_t h;
        std::memcpy(&h, block + 2 * lane, 2);
        const uint32_t bits = static_cast<uint32_t>(h) << 16;
        std::memcpy(out + k, &bits, 4);
      }
    }
  }
}

}  // namespace firstlight::scalar
