// Persistent threads that run one function together, with a barrier that spins briefly and then sleeps.
//
// The caller is member 0. Work inside a phase is taken in chunks, by whoever is free, so a member that the kernel has
// descheduled costs at most the chunk it holds. When a neighbour keeps a core busy, even that is too much: the team
// measures how long member 0 waits or is off its core, and runs alone for a while when that share is high. Results
// never depend on how many members run.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace firstlight {

int64_t monotonic_ns();

inline void cpu_relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

class ThreadTeam {
 public:
  explicit ThreadTeam(int num_threads);
  ~ThreadTeam();
  ThreadTeam(const ThreadTeam&) = delete;
  ThreadTeam& operator=(const ThreadTeam&) = delete;

  int size() const { return size_; }
  // Members that run the current call: size(), or 1 while a neighbour is in the way. Fixed during run().
  int active() const { return active_; }
  // How many calls of run() went alone because of a neighbour.
  int64_t solo_runs() const { return solo_runs_; }

  // Calls body(member) on every active member and returns when all have returned. body must not throw.
  template <typename Body>
  void run(const Body& body) {
    run_erased([](const void* b, int member) { (*static_cast<const Body*>(b))(member); }, &body);
  }

  // All active members wait here for each other. `idle` is called again and again while this member spins.
  template <typename Idle>
  void barrier(int member, const Idle& idle);
  void barrier(int member) {
    barrier(member, [] {});
  }

 private:
  using Erased = void (*)(const void*, int);

  void run_erased(Erased call, const void* body);
  void work(int member);
  void sleep_until_changed(std::atomic<uint32_t>& word, uint32_t seen);
  void wake_all(std::atomic<uint32_t>& word);
  void note_run(int64_t wall_ns, int64_t cpu_ns);

  static constexpr int kSpins = 4000;  // about 40 us of pauses: longer than a healthy chunk, shorter than a time slice

  const int size_;
  int active_ = 1;
  std::vector<std::thread> threads_;

  alignas(64) std::atomic<uint32_t> start_{0};  // changes when a run begins
  alignas(64) std::atomic<uint32_t> phase_{0};  // changes when a barrier opens
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int> sleepers_{0};
  std::atomic<bool> stop_{false};
  Erased call_ = nullptr;
  const void* body_ = nullptr;

  // Neighbour detection; only member 0 touches these.
  int64_t lost_ns_ = 0, seen_ns_ = 0;
  int64_t solo_until_ns_ = 0;
  int64_t solo_ns_ = 0;
  int64_t solo_runs_ = 0;
};

template <typename Idle>
void ThreadTeam::barrier([[maybe_unused]] int member, const Idle& idle) {
  if (active_ == 1) return;
  const uint32_t seen = phase_.load(std::memory_order_relaxed);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == active_) {
    arrived_.store(0, std::memory_order_relaxed);
    phase_.store(seen + 1, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) != 0) wake_all(phase_);
    return;
  }
  for (int i = 0; i < kSpins; ++i) {
    if (phase_.load(std::memory_order_acquire) != seen) return;
    idle();
    cpu_relax();
  }
  while (phase_.load(std::memory_order_acquire) == seen) sleep_until_changed(phase_, seen);
}

}  // namespace firstlight
