// The one bindings file: checks what Python hands over, releases the GIL, calls plain functions.
#include <nanobind/nanobind.h>

namespace nb = nanobind;

NB_MODULE(_native, m) { m.attr("abi") = 1; }
