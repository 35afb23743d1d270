#include <cstdlib>
#include <cstring>

#include "cpu_kernels.h"

namespace tessera {
namespace {

// Whether TESSERA_CPU_KERNELS allows a set: unset allows all; "avx2" forbids avx512; "scalar" both.
bool allowed(const char* name) {
  const char* asked = std::getenv("TESSERA_CPU_KERNELS");
  if (asked == nullptr || *asked == '\0' || std::strcmp(asked, "avx512") == 0) return true;
  return std::strcmp(asked, name) == 0;
}

const CpuKernels& choose() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl");
  if (avx512 && allowed("avx512")) return kAvx512Kernels;
  if (avx2 && allowed("avx2")) return kAvx2Kernels;
#endif
  return kScalarKernels;
}

}  // namespace

const CpuKernels& cpu_kernels() {
  static const CpuKernels& chosen = choose();
  return chosen;
}

}  // namespace tessera
