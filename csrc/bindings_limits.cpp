// Python's view of the machine's limits.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <stdexcept>
#include <string>

#include "limits.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

void check(int num_threads, double seconds) {
  if (num_threads < 1 || num_threads > 1024) throw std::invalid_argument("num_threads must be 1 to 1024");
  if (!(seconds > 0 && seconds <= 60)) throw std::invalid_argument("seconds must be above 0, at most 60");
}

double read_bytes_per_s(int num_threads, size_t bytes_per_thread, double seconds) {
  check(num_threads, seconds);
  if (bytes_per_thread == 0 || bytes_per_thread % 256 != 0 || bytes_per_thread > (size_t{1} << 34))
    throw std::invalid_argument("bytes_per_thread must be a multiple of 256, at most 16 GiB");
  double rate = 0;
  {
    nb::gil_scoped_release released;
    rate = firstlight::limits::read_bytes_per_s(firstlight::limits::pick(), num_threads, bytes_per_thread, seconds);
  }
  if (rate == 0) throw std::runtime_error("no memory to measure bandwidth in");
  return rate;
}

double macs_per_s(int num_threads, double seconds) {
  check(num_threads, seconds);
  nb::gil_scoped_release released;
  return firstlight::limits::macs_per_s(firstlight::limits::pick(), num_threads, seconds);
}

}  // namespace

NB_MODULE(_limits, m) {
  m.doc() = "What this machine can do at most";
  m.def("read_bytes_per_s", &read_bytes_per_s, "num_threads"_a, "bytes_per_thread"_a, "seconds"_a);
  m.def("macs_per_s", &macs_per_s, "num_threads"_a, "seconds"_a);
  m.def("instructions", [] { return std::string(firstlight::limits::pick().instructions); });
}
