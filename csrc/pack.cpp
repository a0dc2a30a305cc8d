#include "pack.h"

#include <cstring>

#include "math_scalar.h"

namespace firstlight {
namespace {

void put_scale(const Weight& w, uint8_t* record, int slot, int lane, float value) {
  if (w.scale_f32) {
    std::memcpy(record + slot * 32 + lane * 4, &value, 4);
  } else {
    const uint16_t h = scalar::float_to_half(value);
    std::memcpy(record + slot * 16 + lane * 2, &h, 2);
  }
}

// The 32 codes of one row's group into their places.
void put_nibbles(uint8_t* codes, int lane, const uint8_t* c) {
  for (int j = 0; j < 4; ++j) {
    uint8_t* at = codes + j * 32 + lane * 4;
    for (int b = 0; b < 4; ++b) at[b] = static_cast<uint8_t>((c[4 * j + b] & 15) | (c[16 + 4 * j + b] << 4));
  }
}

}  // namespace

void pack_codes(const Weight& w, const uint8_t* codes, const float* scales, const float* mins, uint8_t* out) {
  const size_t record = w.record_bytes();
  const int parts = 32 / w.group, slots = parts * (w.kind == LayoutKind::kNibble || w.has_min ? 2 : 1);
  const size_t code_offset = static_cast<size_t>(slots) * (w.scale_f32 ? 32 : 16);
  std::memset(out, 0, w.total_bytes());
  for (int r = 0; r < w.rows; ++r) {
    uint8_t* p = out + static_cast<size_t>(r / 8) * w.row_block_bytes();
    const int lane = r % 8;
    const size_t first_scale = static_cast<size_t>(r) * static_cast<size_t>(w.cols / w.group);
    for (int g = 0; g < w.groups(); ++g, p += record, codes += 32) {
      for (int h = 0; h < parts; ++h) {
        const size_t at = first_scale + static_cast<size_t>(g * parts + h);
        put_scale(w, p, h, lane, scales[at]);
        if (slots > parts) put_scale(w, p, parts + h, lane, mins[at]);
      }
      if (w.kind == LayoutKind::kNibble) {
        put_nibbles(p + code_offset, lane, codes);
      } else {
        for (int u = 0; u < 16; ++u) std::memcpy(p + code_offset + u * 16 + lane * 2, codes + 2 * u, 2);
      }
    }
  }
}

void pack_values(const Weight& w, const uint8_t* values, uint8_t* out) {
  const size_t size = w.kind == LayoutKind::kFloat ? 4 : 2;
  std::memset(out, 0, w.total_bytes());
  for (int r = 0; r < w.rows; ++r) {
    uint8_t* p = out + static_cast<size_t>(r / 8) * w.row_block_bytes() + static_cast<size_t>(r % 8) * size;
    for (int k = 0; k < w.cols; ++k, p += 8 * size, values += size) std::memcpy(p, values, size);
  }
}

}  // namespace firstlight
