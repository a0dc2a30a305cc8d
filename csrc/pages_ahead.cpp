#include "pages_ahead.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>

namespace firstlight {
namespace {

constexpr size_t kPage = size_t{2} << 20;
constexpr size_t kLead = size_t{3} << 18;  // of a page: the next one is asked for when so much of the last is left
constexpr int kPopulateWrite = 23;         // MADV_POPULATE_WRITE, Linux 5.14
constexpr int kRest = 3;                   // times as long as a page took, before the next: compute threads go first

}  // namespace

PagesAhead::PagesAhead(uint8_t* base, size_t part_bytes, size_t num_parts, size_t unit_bytes)
    : base_(base), part_bytes_(part_bytes), num_parts_(num_parts), unit_bytes_(unit_bytes) {
  thread_ = std::thread([this] { work(); });
}

PagesAhead::~PagesAhead() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_one();
  thread_.join();
}

void PagesAhead::will_write(size_t unit) {
  if (unit <= highest_) return;
  highest_ = unit;
  const size_t used = (unit + 1) * unit_bytes_;
  const size_t wanted = std::min(part_bytes_, (used + kLead + kPage - 1) / kPage * kPage);
  const std::lock_guard lock(mutex_);
  if (wanted <= asked_) return;
  asked_ = wanted;
  changed_.notify_one();
}

void PagesAhead::work() {
  size_t done = 0;
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return stop_ || asked_ > done; });
    const size_t to = std::min(asked_, done + kPage);
    for (size_t part = 0; part < num_parts_; ++part) {
      if (stop_) return;
      lock.unlock();
      const auto from = std::chrono::steady_clock::now();
      if (!supply(part, done, to)) return;
      const auto rest = kRest * (std::chrono::steady_clock::now() - from);
      lock.lock();
      changed_.wait_for(lock, rest, [&] { return stop_; });
    }
    done = to;
  }
}

// False where the kernel cannot: pages then come on first use, as they would have without this thread.
bool PagesAhead::supply(size_t part, size_t from, size_t to) {
  const size_t small = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t begin = (part * part_bytes_ + from) / small * small;
  const size_t end = part * part_bytes_ + to;
  return madvise(base_ + begin, end - begin, kPopulateWrite) == 0;
}

}  // namespace firstlight
