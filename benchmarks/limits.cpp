// What this machine can do at most: DRAM and L3 read bandwidth, float32 and int8 multiply-add rates.
//
//   g++ -O3 -std=c++20 -mavx2 -mfma -pthread limits.cpp -o limits && ./limits THREADS
//
// Prints one JSON object. Each figure is the best of several passes with all threads started together. The int8 figure
// counts multiply-adds of the loop that a nibble product needs: four maddubs summed in 16 bits for each madd.
#include <immintrin.h>
#include <time.h>

#include <atomic>
#include <barrier>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

namespace {

double now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec) * 1e-9;
}

std::atomic<long long> sink{0};  // results go here, so that no loop is dead

// Best rate over passes: `work` does `amount` units per thread and pass.
double best_rate(int threads, int passes, double amount, const std::function<void(int)>& work) {
  double best = 0;
  double started = 0;
  std::barrier gate(threads + 1);
  std::vector<std::thread> team;
  for (int t = 0; t < threads; ++t) {
    team.emplace_back([&, t] {
      for (int p = 0; p < passes; ++p) {
        gate.arrive_and_wait();
        work(t);
        gate.arrive_and_wait();
      }
    });
  }
  for (int p = 0; p < passes; ++p) {
    started = now();
    gate.arrive_and_wait();
    gate.arrive_and_wait();
    const double rate = amount * threads / (now() - started);
    if (rate > best) best = rate;
  }
  for (auto& thread : team) thread.join();
  return best;
}

double read_rate(int threads, size_t bytes, int repeats, int passes) {
  std::vector<uint8_t*> spans;
  for (int t = 0; t < threads; ++t) {
    spans.push_back(static_cast<uint8_t*>(std::aligned_alloc(64, bytes)));
    std::memset(spans.back(), t + 1, bytes);
  }
  const double rate = best_rate(threads, passes, static_cast<double>(bytes) * repeats, [&](int t) {
    __m256i a = _mm256_setzero_si256(), b = a, c = a, d = a;
    for (int r = 0; r < repeats; ++r) {
      const auto* p = reinterpret_cast<const __m256i*>(spans[static_cast<size_t>(t)]);
      for (size_t i = 0; i < bytes / 32; i += 4) {
        a = _mm256_xor_si256(a, _mm256_load_si256(p + i));
        b = _mm256_add_epi8(b, _mm256_load_si256(p + i + 1));
        c = _mm256_xor_si256(c, _mm256_load_si256(p + i + 2));
        d = _mm256_add_epi8(d, _mm256_load_si256(p + i + 3));
      }
    }
    const __m256i all = _mm256_add_epi8(_mm256_add_epi8(a, b), _mm256_add_epi8(c, d));
    sink += _mm256_extract_epi64(all, 0);
  });
  for (uint8_t* span : spans) std::free(span);
  return rate;
}

constexpr int kSteps = 4'000'000;

double float_rate(int threads) {
  return best_rate(threads, 5, 10.0 * 8 * kSteps, [](int t) {
    __m256 acc[10];
    const __m256 x = _mm256_set1_ps(0.5f + static_cast<float>(t)), y = _mm256_set1_ps(1e-3f);
#pragma GCC unroll 10
    for (auto& v : acc) v = x;
    for (int i = 0; i < kSteps; ++i) {
#pragma GCC unroll 10
      for (auto& v : acc) {
        v = _mm256_fmadd_ps(v, y, x);
        asm("" : "+x"(v));
      }
    }
    __m256 sum = acc[0];
#pragma GCC unroll 10
    for (int i = 1; i < 10; ++i) sum = _mm256_add_ps(sum, acc[i]);
    sink += static_cast<long long>(_mm256_cvtss_f32(sum));
  });
}

double int8_rate(int threads) {
  return best_rate(threads, 5, 3.0 * 4 * 32 * kSteps, [](int t) {
    __m256i acc[3];
#pragma GCC unroll 3
    for (auto& v : acc) v = _mm256_setzero_si256();
    __m256i w = _mm256_set1_epi8(3);
    const __m256i x = _mm256_set1_epi8(static_cast<char>(t + 1)), ones = _mm256_set1_epi16(1);
    for (int i = 0; i < kSteps; ++i) {
#pragma GCC unroll 3
      for (auto& v : acc) {
        __m256i c = _mm256_maddubs_epi16(w, x);
#pragma GCC unroll 3
        for (int j = 0; j < 3; ++j) {
          asm("" : "+x"(w));
          c = _mm256_add_epi16(c, _mm256_maddubs_epi16(w, x));
        }
        v = _mm256_add_epi32(v, _mm256_madd_epi16(c, ones));
        asm("" : "+x"(v));
      }
    }
    sink += _mm256_extract_epi32(_mm256_add_epi32(_mm256_add_epi32(acc[0], acc[1]), acc[2]), 0);
  });
}

}  // namespace

int main(int argc, char** argv) {
  const int threads = argc > 1 ? std::atoi(argv[1]) : 1;
  if (threads < 1 || threads > 1024) {
    std::fprintf(stderr, "threads is 1..1024\n");
    return 2;
  }
  const double dram = read_rate(threads, size_t{256} << 20, 1, 6);
  const double model = read_rate(threads, size_t{45} << 20, 4, 6);
  const double l3 = read_rate(threads, size_t{8} << 20, 24, 6);
  std::printf(
      "{\"threads\": %d, \"dram_gb_s\": %.2f, \"span_45_mib_gb_s\": %.2f, \"l3_gb_s\": %.2f, \"fp32_gmac_s\": %.1f, "
      "\"int8_gmac_s\": %.1f}\n",
      threads, dram * 1e-9, model * 1e-9, l3 * 1e-9, float_rate(threads) * 1e-9, int8_rate(threads) * 1e-9);
  return sink == 42 ? 1 : 0;
}
