// What the bindings share: array types, checks and names. Every refusal is a std::invalid_argument, Python's
// ValueError.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <stdexcept>
#include <string>

#include "ops.h"
#include "weight.h"

namespace firstlight {

namespace nb = nanobind;

template <typename T, size_t N>
using In = nb::ndarray<const T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;
template <typename T, size_t N>
using Out = nb::ndarray<T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;

[[noreturn]] inline void refuse(const std::string& what) { throw std::invalid_argument(what); }

inline void check_range(const char* name, long long value, long long low, long long high) {
  if (value < low || value >= high) {
    refuse("`" + std::string(name) + "` is " + std::to_string(value) + ", must be in [" + std::to_string(low) + ", " +
           std::to_string(high) + ")");
  }
}

inline LayoutKind kind_of(const std::string& name) {
  if (name == "nibble") return LayoutKind::kNibble;
  if (name == "byte") return LayoutKind::kByte;
  if (name == "half") return LayoutKind::kHalf;
  if (name == "bf16") return LayoutKind::kBf16;
  if (name == "float") return LayoutKind::kFloat;
  refuse("unknown weight layout `" + name + "`");
}

inline GatedKind gated_of(const std::string& name) {
  if (name == "silu") return GatedKind::kSilu;
  if (name == "gelu_tanh") return GatedKind::kGeluTanh;
  if (name == "gelu") return GatedKind::kGelu;
  refuse("unknown activation `" + name + "`");
}

inline Weight checked_weight(const std::string& kind, int rows, int cols, int group, bool has_min, bool scale_f32) {
  Weight w{kind_of(kind), rows, cols, group, has_min, scale_f32, nullptr};
  check_range("rows", rows, 1, 1 << 28);
  check_range("cols", cols, 1, 1 << 28);
  const bool is_quantised = w.kind == LayoutKind::kNibble || w.kind == LayoutKind::kByte;
  if (is_quantised && cols % 32 != 0) refuse("`cols` must be a multiple of 32 for a quantised layout");
  if (w.kind == LayoutKind::kNibble && group != 32) refuse("a nibble layout has groups of 32");
  if (w.kind == LayoutKind::kByte && group != 16 && group != 32) refuse("a byte layout has groups of 16 or 32");
  return w;
}

}  // namespace firstlight
