// Packing plain codes into the layouts of firstlight/models/layouts.py. The Python packer is the oracle.
#pragma once

#include <cstdint>

#include "weight.h"

namespace firstlight {

// codes is [rows, cols] uint8 (nibble) or int8 (byte); scales and mins are [rows, cols / group] float32 (mins may be
// nullptr for byte). Writes w.total_bytes() to out; rows past w.rows are zero. w.data is not read.
void pack_codes(const Weight& w, const uint8_t* codes, const float* scales, const float* mins, uint8_t* out);

// values is [rows, cols], 2 or 4 bytes each as w.kind says.
void pack_values(const Weight& w, const uint8_t* values, uint8_t* out);

}  // namespace firstlight
