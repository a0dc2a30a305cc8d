#include "kernels.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <cstring>
#include <initializer_list>

namespace firstlight {
namespace {

constexpr Kernels kScalar{"scalar",         narrow_layout,        scalar::gemm,       scalar::quantise,
                          scalar::rms_norm, scalar::gated,        scalar::rope,       scalar::soft_cap,
                          scalar::write_kv, scalar::attend_split, scalar::merge_split};

#if defined(__x86_64__)
constexpr Kernels kAvx2{"avx2",     narrow_layout,  avx2::gemm,     avx2::quantise,     avx2::rms_norm,   avx2::gated,
                        avx2::rope, avx2::soft_cap, avx2::write_kv, avx2::attend_split, avx2::merge_split};

const Kernels* avx2_kernels() {
  const bool can = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  return can ? &kAvx2 : nullptr;
}

// What takes little time is AVX2's.
constexpr Kernels kVnni{"vnni",         narrow_layout,        vnni::gemm,         avx512::quantise,
                        avx2::rms_norm, avx512::gated,        avx2::rope,         avx2::soft_cap,
                        avx2::write_kv, avx512::attend_split, avx512::merge_split};

const Kernels* vnni_kernels() {
  const bool can = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
                   __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                   __builtin_cpu_supports("avx512vnni");
  return can && avx2_kernels() ? &kVnni : nullptr;
}

constexpr Kernels kAmx{"amx",          amx::act_layout,      amx::gemm,          avx512::quantise,
                       avx2::rms_norm, avx512::gated,        avx2::rope,         avx2::soft_cap,
                       avx2::write_kv, avx512::attend_split, avx512::merge_split};

// Linux gives a process the tiles on request. Source: its Documentation/arch/x86/xstate.rst.
bool may_use_tiles() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

const Kernels* amx_kernels() {
  static const bool can = __builtin_cpu_supports("amx-int8") && __builtin_cpu_supports("amx-tile") && may_use_tiles();
  return can && vnni_kernels() ? &kAmx : nullptr;
}
#else
const Kernels* amx_kernels() { return nullptr; }
const Kernels* avx2_kernels() { return nullptr; }
const Kernels* vnni_kernels() { return nullptr; }
#endif

}  // namespace

const Kernels* find_kernels(const char* name) {
  if (std::strcmp(name, "scalar") == 0) return &kScalar;
  if (std::strcmp(name, "avx2") == 0) return avx2_kernels();
  if (std::strcmp(name, "vnni") == 0) return vnni_kernels();
  if (std::strcmp(name, "amx") == 0) return amx_kernels();
  if (std::strcmp(name, "auto") != 0) return nullptr;
  for (const auto best : {amx_kernels, vnni_kernels, avx2_kernels}) {
    if (const Kernels* kernels = best()) return kernels;
  }
  return &kScalar;
}

}  // namespace firstlight
