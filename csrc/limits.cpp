// Threads that start together, read or multiply for a while, and say how fast the slowest of them let all be.
#include "limits.h"

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

namespace firstlight::limits {
namespace {

using Clock = std::chrono::steady_clock;

double now_s() { return std::chrono::duration<double>(Clock::now().time_since_epoch()).count(); }

std::atomic<uint64_t> sink{0};  // results go here, so that no loop is dead

struct FreeMemory {
  void operator()(uint8_t* p) const { std::free(p); }
};
using Memory = std::unique_ptr<uint8_t, FreeMemory>;

// Memory that is really there: every page written, and with values that no page sharing can merge.
Memory filled(size_t size, uint64_t seed) {
  Memory memory(static_cast<uint8_t*>(std::aligned_alloc(64, size)));
  for (size_t i = 0; memory && i + 8 <= size; i += 8) {
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    std::memcpy(memory.get() + i, &seed, 8);
  }
  return memory;
}

// Runs work(thread) on num_threads at once, again and again for seconds; the best pass in units per second, where one
// pass of all threads is units. A pass begins when all threads are there and ends with the last of them.
template <typename Work>
double best_rate(int num_threads, double seconds, double units, const Work& work) {
  std::atomic<int> arrived{0}, left{0};
  std::atomic<int> pass{0};
  std::atomic<bool> is_over{false};
  std::vector<std::thread> threads;
  for (int t = 1; t < num_threads; ++t) {
    threads.emplace_back([&, t] {
      for (int seen = 0;;) {
        while (pass.load(std::memory_order_acquire) == seen && !is_over) std::this_thread::yield();
        if (is_over) return;
        seen = pass;
        arrived.fetch_add(1);
        sink.fetch_xor(work(t), std::memory_order_relaxed);
        left.fetch_add(1, std::memory_order_release);
      }
    });
  }
  double best = 0;
  const double end_s = now_s() + seconds;
  do {
    arrived = 0;
    left = 0;
    pass.fetch_add(1, std::memory_order_release);
    while (arrived.load() < num_threads - 1) std::this_thread::yield();
    const double begin_s = now_s();
    sink.fetch_xor(work(0), std::memory_order_relaxed);
    while (left.load(std::memory_order_acquire) < num_threads - 1) std::this_thread::yield();
    const double rate = units / (now_s() - begin_s);
    if (rate > best) best = rate;
  } while (now_s() < end_s);
  is_over = true;
  for (std::thread& thread : threads) thread.join();
  return best;
}

}  // namespace

namespace scalar {

uint64_t read(const uint8_t* data, size_t size) {
  uint64_t sums[4] = {0, 0, 0, 0};
  for (size_t i = 0; i < size; i += 32) {
    uint64_t v[4];
    std::memcpy(v, data + i, 32);
    for (int k = 0; k < 4; ++k) sums[k] ^= v[k];
  }
  return sums[0] ^ sums[1] ^ sums[2] ^ sums[3];
}

int64_t macs(const uint8_t* operands, int64_t rounds) {
  const int8_t* values = reinterpret_cast<const int8_t*>(operands + 256);
  int64_t total = 0;
  for (int64_t round = 0; round < rounds; ++round) {
    asm volatile("" : : "r"(operands) : "memory");
    for (int t = 0; t < 6; ++t) {
      int32_t sum = 0;
      for (int k = 0; k < 256; ++k) sum += static_cast<int32_t>(operands[k]) * values[t * 32 + k % 32];
      total ^= sum;
    }
  }
  return total;
}

}  // namespace scalar

Kernels pick() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) return {avx2::read, avx2::macs, "avx2"};
#endif
  return {scalar::read, scalar::macs, "scalar"};
}

double read_bytes_per_s(const Kernels& kernels, int num_threads, size_t bytes_per_thread, double seconds) {
  std::vector<Memory> memory;
  for (int t = 0; t < num_threads; ++t) {
    memory.push_back(filled(bytes_per_thread, static_cast<uint64_t>(t) + 1));
    if (!memory.back()) return 0;
  }
  const double bytes = static_cast<double>(bytes_per_thread) * num_threads;
  return best_rate(num_threads, seconds, bytes,
                   [&](int t) { return kernels.read(memory[static_cast<size_t>(t)].get(), bytes_per_thread); });
}

double macs_per_s(const Kernels& kernels, int num_threads, double seconds) {
  alignas(64) uint8_t operands[kOperandBytes];
  for (size_t i = 0; i < 256; ++i) operands[i] = static_cast<uint8_t>(i * 7 % 16);
  for (size_t i = 256; i < kOperandBytes; ++i) operands[i] = static_cast<uint8_t>(i * 37 % 251);
  const double begin_s = now_s();
  int64_t rounds = 1000;
  sink.fetch_xor(static_cast<uint64_t>(kernels.macs(operands, rounds)));
  // Passes of about 20 ms: long beside the start, short beside what the machine's other tenants take.
  rounds = static_cast<int64_t>(static_cast<double>(rounds) * 0.02 / (now_s() - begin_s + 1e-9)) + 1;
  const double units = static_cast<double>(rounds) * static_cast<double>(kMacsPerRound) * num_threads;
  return best_rate(num_threads, seconds, units,
                   [&](int) { return static_cast<uint64_t>(kernels.macs(operands, rounds)); });
}

}  // namespace firstlight::limits
