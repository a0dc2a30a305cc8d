// Has the kernel supply memory shortly before it is needed, on a thread of its own.
//
// The first write to a 2 MiB page waits for the kernel to find and clear it: 2-3 ms on a small virtual machine. KV
// memory is laid out by layer, so every layer reaches its next page in the same step, and that step would take 100-200
// ms longer. Knows bytes and units, not KV.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <thread>

namespace firstlight {

class PagesAhead {
 public:
  // Memory at `base` is `num_parts` parts of `part_bytes`, each a run of units of `unit_bytes`. Contents never change.
  PagesAhead(uint8_t* base, size_t part_bytes, size_t num_parts, size_t unit_bytes);
  ~PagesAhead();
  PagesAhead(const PagesAhead&) = delete;
  PagesAhead& operator=(const PagesAhead&) = delete;

  // Unit `unit` of every part is about to be written: what follows it should be there soon. One thread calls this.
  void will_write(size_t unit);

 private:
  void work();
  bool supply(size_t part, size_t from, size_t to);

  uint8_t* const base_;
  const size_t part_bytes_, num_parts_, unit_bytes_;
  size_t highest_ = 0;  // caller's thread only
  size_t asked_ = 0;    // leading bytes of each part to supply
  bool stop_ = false;
  std::mutex mutex_;  // guards asked_, stop_
  std::condition_variable changed_;
  std::thread thread_;
};

}  // namespace firstlight
