// One table of kernels, chosen once by what the processor offers: the only dispatch point.
#pragma once

#include "attention.h"
#include "gemm.h"
#include "ops.h"

namespace firstlight {

struct Kernels {
  const char* name;
  ActLayoutFn act_layout;
  GemmFn gemm;
  QuantiseFn quantise;
  void (*rms_norm)(const float* x, const float* weight, float eps, int n, float* out);
  void (*gated)(GatedKind kind, const float* gate, const float* up, int n, float* out);
  void (*rope)(float* x, int num_heads, int head_dim, int rotary_dim, bool interleaved, const float* cos,
               const float* sin);
  void (*soft_cap)(float* x, float cap, int n);
  KvWriteFn write_kv;
  AttendFn attend_split;
  MergeFn merge_split;
};

// name: "auto", "amx", "vnni", "avx2" or "scalar". Returns nullptr when the name is unknown or the processor lacks what
// it needs.
const Kernels* find_kernels(const char* name);

}  // namespace firstlight
