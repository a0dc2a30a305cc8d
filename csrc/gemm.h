// Matrix products of a few rows of activations with a packed weight: the contract of every kernel set.
//
// Order of operations (the same in every kernel set, at every tile size, so that a row's result never depends on its
// neighbours): for each output, groups ascend from 0;
//   nibble   acc = fma(ws * ad, float(sum_k code * q), acc), then acc = fma(wm, as, acc)
//   byte     the same per group of 32 or per each 16; the min's fma only when the layout has mins
//   others   acc = fma(w, x, acc) for k ascending
// where the integer sums are exact. Then, once: acc + bias when there is one, then y + acc when accumulating.
//
// Activations are quantised per row and group of 32: nibble takes int8 (max -> 127), byte takes int16 (max -> 32767).
#pragma once

#include <cstddef>
#include <cstdint>

#include "weight.h"

namespace firstlight {

// A group whose largest magnitude is below this is taken as zero: its scale could not be inverted.
constexpr float kSmallestMax = 1e-30f;

constexpr int kTile =
    6;  // most rows of activations that one inner loop covers: 6 accumulators, codes and broadcasts fit 16 registers

// What form of activations a weight needs.
enum class ActKind : int { kInt8 = 0, kInt16 = 1, kFloat = 2 };

inline ActKind act_kind(const Weight& w) {
  if (w.kind == LayoutKind::kNibble) return ActKind::kInt8;
  if (w.kind == LayoutKind::kByte) return ActKind::kInt16;
  return ActKind::kFloat;
}

// How a kernel set wants its quantised activations.
struct ActLayout {
  int tile_rows = kTile;   // most rows in a tile
  bool in_planes = false;  // int16 only: of each 32 inputs the low bytes, then the high bytes
};
using ActLayoutFn = ActLayout (*)(ActKind kind, int num_rows);
inline ActLayout narrow_layout(ActKind, int) { return {}; }

// Activations of num_rows rows, quantised, in num_tiles() tiles whose sizes differ by at most one.
// Inside a tile of T rows: q[(g * T + t) * 32 + k], scale[g * T + t]; for int8 sums[g * T + t] = scale * sum(q) over 32
// inputs, for int16 sums[(g * 2 + half) * T + t] over each 16 inputs. A tile that begins at row s starts at q + s *
// cols, scale + s * groups, sums + s * groups (int8) or sums + s * groups * 2 (int16). For kFloat, q holds float x[k *
// T + t] of each tile.
struct Activations {
  ActKind kind = ActKind::kInt8;
  ActLayout layout = {};
  int num_rows = 0;
  int tiles = 0;
  int cols = 0;
  void* q = nullptr;
  float* scale = nullptr;
  float* sums = nullptr;

  int num_tiles() const { return tiles; }
  int tile_start(int tile) const {
    const int n = num_tiles(), base = num_rows / n, extra = num_rows % n;
    return tile * base + (tile < extra ? tile : extra);
  }
  int tile_of(int row) const {
    const int n = num_tiles(), base = num_rows / n, extra = num_rows % n;
    return row < extra * (base + 1) ? row / (base + 1) : extra + (row - extra * (base + 1)) / base;
  }
};

inline size_t act_element_bytes(ActKind kind) { return kind == ActKind::kInt8 ? 1 : kind == ActKind::kInt16 ? 2 : 4; }
inline size_t round64(size_t n) { return (n + 63) / 64 * 64; }

// Kernels may load, and ignore, this much past a row's last value.
constexpr size_t kActTail = 1024;

// Bytes a caller sets aside for q, scale and sums of up to num_rows rows.
inline size_t act_bytes(ActKind kind, int num_rows, int cols) {
  const size_t rows = static_cast<size_t>(num_rows), groups = static_cast<size_t>(cols) / 32;
  const size_t q = round64(rows * static_cast<size_t>(cols) * act_element_bytes(kind));
  return kind == ActKind::kFloat ? q : q + round64(rows * groups * 4) + round64(rows * groups * 8) + kActTail;
}

// Lays num_rows rows out in memory of at least act_bytes, 64-byte aligned.
inline Activations act_view(ActKind kind, ActLayout layout, int num_rows, int cols, void* memory) {
  const size_t rows = static_cast<size_t>(num_rows), groups = static_cast<size_t>(cols) / 32;
  Activations a;
  a.kind = kind;
  a.layout = layout;
  a.num_rows = num_rows;
  a.tiles = (num_rows + layout.tile_rows - 1) / layout.tile_rows;
  a.cols = cols;
  char* p = static_cast<char*>(memory);
  a.q = p;
  if (kind != ActKind::kFloat) {
    p += round64(rows * static_cast<size_t>(cols) * act_element_bytes(kind));
    a.scale = reinterpret_cast<float*>(p);
    a.sums = reinterpret_cast<float*>(p + round64(rows * groups * 4));
  }
  return a;
}

// Tiles [begin, end) of some activations, as activations of their own.
inline Activations tiles_of(const Activations& a, int begin, int end) {
  const size_t before = static_cast<size_t>(a.tile_start(begin)), groups = static_cast<size_t>(a.cols) / 32;
  Activations part = a;
  part.num_rows = a.tile_start(end) - a.tile_start(begin);
  part.tiles = end - begin;
  part.q = static_cast<char*>(a.q) + before * static_cast<size_t>(a.cols) * act_element_bytes(a.kind);
  if (a.kind != ActKind::kFloat) {
    part.scale = a.scale + before * groups;
    part.sums = a.sums + before * groups * (a.kind == ActKind::kInt16 ? 2 : 1);
  }
  return part;
}

// Scratch one thread needs for gemm: up to four row blocks unpacked.
inline size_t gemm_scratch_bytes(int max_cols) { return static_cast<size_t>(max_cols) / 32 * 2560 + 4096; }

// y[t * ldy + r] for rows of weight blocks [rb0, rb1): y is [num_rows, ldy] float32 and does not alias anything else.
// Weights' data may be unaligned; scratch is 64-byte aligned and private to the caller.
using GemmFn = void (*)(const Weight& w, const Activations& a, const float* bias, bool accumulate, float* y, size_t ldy,
                        int rb0, int rb1, uint8_t* scratch);

// Quantises groups [begin, end) of one row: x is [cols] float32; row is its index among a.num_rows. Float activations
// have one group, the row.
using QuantiseFn = void (*)(const float* x, const Activations& a, int row, int begin, int end);
inline int act_groups(const Activations& a) { return a.kind == ActKind::kFloat ? 1 : a.cols / 32; }

namespace scalar {
void gemm(const Weight& w, const Activations& a, const float* bias, bool accumulate, float* y, size_t ldy, int rb0,
          int rb1, uint8_t* scratch);
void quantise(const float* x, const Activations& a, int row, int begin, int end);
}  // namespace scalar
namespace avx2 {
void gemm(const Weight& w, const Activations& a, const float* bias, bool accumulate, float* y, size_t ldy, int rb0,
          int rb1, uint8_t* scratch);
void quantise(const float* x, const Activations& a, int row, int begin, int end);
}  // namespace avx2
namespace avx512 {
void quantise(const float* x, const Activations& a, int row, int begin, int end);
}  // namespace avx512
namespace vnni {
void gemm(const Weight& w, const Activations& a, const float* bias, bool accumulate, float* y, size_t ldy, int rb0,
          int rb1, uint8_t* scratch);
}  // namespace vnni
namespace amx {
ActLayout act_layout(ActKind kind, int num_rows);
void gemm(const Weight& w, const Activations& a, const float* bias, bool accumulate, float* y, size_t ldy, int rb0,
          int rb1, uint8_t* scratch);
}  // namespace amx

}  // namespace firstlight
