// What this machine can do at most: bytes read from DRAM and int8 multiply-adds, per second, over some threads.
// A module of its own: it shares nothing with the kernels, so that measuring them cannot change them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace firstlight::limits {

// Reads size bytes (a multiple of 256, 64-byte aligned) once and returns a value that depends on all of them.
using ReadFn = uint64_t (*)(const uint8_t* data, size_t size);

// Runs rounds of kMacsPerRound multiply-adds of 4-bit codes with int8 values and returns a value that depends on them.
using MacsFn = int64_t (*)(const uint8_t* operands, int64_t rounds);

constexpr int64_t kMacsPerRound = 6 * 8 * 32;  // 6 activation rows, 8 products of 32: the shape of our matrix product
constexpr size_t kOperandBytes = 2 * 8 * 32;   // codes, then values

struct Kernels {
  ReadFn read;
  MacsFn macs;
  const char* instructions;
};

namespace scalar {
uint64_t read(const uint8_t* data, size_t size);
int64_t macs(const uint8_t* operands, int64_t rounds);
}  // namespace scalar
namespace avx2 {
uint64_t read(const uint8_t* data, size_t size);
int64_t macs(const uint8_t* operands, int64_t rounds);
}  // namespace avx2

Kernels pick();

// Bytes per second that num_threads together read, each its own bytes_per_thread, best of the passes that fit seconds.
// Returns 0 when memory cannot be had.
double read_bytes_per_s(const Kernels& kernels, int num_threads, size_t bytes_per_thread, double seconds);

// Multiply-adds per second of num_threads together, best of the passes that fit seconds.
double macs_per_s(const Kernels& kernels, int num_threads, double seconds);

}  // namespace firstlight::limits
