// The packed weight layouts, as firstlight/models/layouts.py describes them byte for byte.
#pragma once

#include <cstddef>
#include <cstdint>

namespace firstlight {

enum class LayoutKind : int { kNibble = 0, kByte = 1, kHalf = 2, kBf16 = 3, kFloat = 4 };

// One matrix [rows, cols] in one layout. Does not own `data`.
struct Weight {
  LayoutKind kind = LayoutKind::kFloat;
  int rows = 0;            // as the model has them; the data is padded to a multiple of 8
  int cols = 0;            // a multiple of 32 for nibble and byte
  int group = 0;           // inputs per scale: 16 or 32; 0 for the float kinds
  bool has_min = false;    // byte only; nibble always has mins
  bool scale_f32 = false;  // scales and mins are float32, else float16
  const uint8_t* data = nullptr;

  int row_blocks() const { return (rows + 7) / 8; }
  int groups() const { return cols / 32; }

  // Bytes of one record: one (row block, 32 inputs) for nibble and byte, one (row block, input) for the others.
  size_t record_bytes() const {
    const size_t scale = scale_f32 ? 4 : 2;
    switch (kind) {
      case LayoutKind::kNibble:
        return 8 * scale * 2 + 128;
      case LayoutKind::kByte:
        return 8 * scale * (32 / group) * (has_min ? 2 : 1) + 256;
      case LayoutKind::kFloat:
        return 32;
      default:
        return 16;
    }
  }
  size_t records_per_row_block() const {
    return kind == LayoutKind::kNibble || kind == LayoutKind::kByte ? static_cast<size_t>(cols) / 32
                                                                    : static_cast<size_t>(cols);
  }
  size_t row_block_bytes() const { return record_bytes() * records_per_row_block(); }
  size_t total_bytes() const { return row_block_bytes() * static_cast<size_t>(row_blocks()); }
};

}  // namespace firstlight
