#include "thread_team.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

namespace firstlight {
namespace {

int64_t clock_ns(clockid_t clock) {
  timespec t;
  clock_gettime(clock, &t);
  return static_cast<int64_t>(t.tv_sec) * 1000000000 + t.tv_nsec;
}

constexpr int64_t kWindowNs = 12'000'000;  // judge a neighbour over at least this much run time
// Of run time, before the team goes alone. A virtual machine loses up to 0.3 to its host at bad times, where two
// threads are still faster than one; a process that never leaves a core takes 0.4 to 0.65.
constexpr double kLostShare = 0.36;
constexpr int64_t kFirstSoloNs = 40'000'000;  // how long alone at first; doubles while it stays as bad
constexpr int64_t kLongestSoloNs = 640'000'000;

}  // namespace

int64_t monotonic_ns() { return clock_ns(CLOCK_MONOTONIC); }

ThreadTeam::ThreadTeam(int num_threads) : size_(num_threads < 1 ? 1 : num_threads) {
  for (int i = 1; i < size_; ++i) threads_.emplace_back([this, i] { work(i); });
}

ThreadTeam::~ThreadTeam() {
  stop_.store(true);
  start_.fetch_add(1);
  wake_all(start_);
  for (auto& t : threads_) t.join();
}

void ThreadTeam::sleep_until_changed(std::atomic<uint32_t>& word, uint32_t seen) {
  sleepers_.fetch_add(1, std::memory_order_seq_cst);
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
  sleepers_.fetch_sub(1, std::memory_order_seq_cst);
}

void ThreadTeam::wake_all(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE_PRIVATE, 1 << 30, nullptr, nullptr, 0);
}

void ThreadTeam::run_erased(Erased call, const void* body) {
  const int64_t from = monotonic_ns(), cpu_from = clock_ns(CLOCK_THREAD_CPUTIME_ID);
  active_ = size_ > 1 && from >= solo_until_ns_ ? size_ : 1;
  if (active_ == 1) {
    call(body, 0);
    if (size_ > 1) ++solo_runs_;
    return;
  }
  call_ = call;
  body_ = body;
  start_.fetch_add(1, std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst) != 0) wake_all(start_);
  call(body, 0);
  barrier(0);
  note_run(monotonic_ns() - from, clock_ns(CLOCK_THREAD_CPUTIME_ID) - cpu_from);
}

// Time member 0 spent asleep in a barrier shows as wall time without CPU time, like time it was kept off its core.
void ThreadTeam::note_run(int64_t wall_ns, int64_t cpu_ns) {
  seen_ns_ += wall_ns;
  lost_ns_ += wall_ns - cpu_ns;
  if (seen_ns_ < kWindowNs) return;
  const bool is_disturbed = static_cast<double>(lost_ns_) > kLostShare * static_cast<double>(seen_ns_);
  seen_ns_ = lost_ns_ = 0;
  if (!is_disturbed) {
    solo_ns_ = 0;
    return;
  }
  solo_ns_ = solo_ns_ == 0 ? kFirstSoloNs : (solo_ns_ * 2 < kLongestSoloNs ? solo_ns_ * 2 : kLongestSoloNs);
  solo_until_ns_ = monotonic_ns() + solo_ns_;
}

void ThreadTeam::work(int member) {
  uint32_t seen = 0;
  for (;;) {
    int spins = 0;
    while (start_.load(std::memory_order_acquire) == seen) {
      if (++spins < kSpins) {
        cpu_relax();
      } else {
        sleep_until_changed(start_, seen);
      }
    }
    seen = start_.load(std::memory_order_acquire);
    if (stop_.load()) return;
    call_(body_, member);
    barrier(member);
  }
}

}  // namespace firstlight
