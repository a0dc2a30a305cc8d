// The one bindings file: checks what Python hands over, releases the GIL, calls plain functions.
#include <nanobind/nanobind.h>

namespace nb = nanobind;

namespace firstlight {
void bind_sampling(nb::module_& m);  // bindings_sampling.cpp
}

NB_MODULE(_native, m) {
  m.attr("abi") = 1;
  firstlight::bind_sampling(m);
}
