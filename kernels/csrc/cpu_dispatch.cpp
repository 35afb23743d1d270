#include <cstdlib>
#include <string_view>

#include "cpu_kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(TESSERA_AMX)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace tessera {
namespace {

// The names that TESSERA_CPU_KERNELS may have, the slowest first.
constexpr std::string_view kNames[] = {"scalar", "avx2", "avx512", "amx"};

// The place in kNames of the best set that TESSERA_CPU_KERNELS allows.  A name that is not there
// allows what every machine has.
int best_allowed() {
  const char* asked = std::getenv("TESSERA_CPU_KERNELS");
  if (asked == nullptr || *asked == '\0') return 3;
  for (int place = 3; place > 0; --place) {
    if (kNames[place] == asked) return place;
  }
  return 0;
}

#if defined(__x86_64__)
// Clang 14 does not know __builtin_cpu_supports("f16c").
bool has_f16c() {
  unsigned eax = 0;
  unsigned ebx = 0;
  unsigned ecx = 0;
  unsigned edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}

const CpuKernels& avx512_kernels() {
  return __builtin_cpu_is("intel") ? kAvx512IntelKernels : kAvx512Kernels;
}
#endif

#if defined(TESSERA_AMX)
// Whether this machine has AMX for bfloat16 and the system lets this process use it; asks the
// system for that, for all threads.
bool amx_usable() {
  unsigned eax = 0;
  unsigned ebx = 0;
  unsigned ecx = 0;
  unsigned edx = 0;
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return false;
  const bool tiles = (edx & (1u << 22)) != 0 && (edx & (1u << 24)) != 0;  // AMX-BF16, AMX-TILE
  if (!tiles || __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) == 0) return false;
  if ((eax & (1u << 5)) == 0) return false;  // AVX512_BF16, which rounds the inputs
  // Linux keeps the tiles of processes that asked for them, from 5.16 on; others refuse the call.
  constexpr int kRequestPermission = 0x1023;
  constexpr int kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

const CpuKernels& amx_kernels() {
  static const CpuKernels kernels = [] {
    CpuKernels made = avx512_kernels();
    made.name = "amx";
    made.linear_bf16 = linear_bf16_amx;
    return made;
  }();
  return kernels;
}
#endif

const CpuKernels& choose() {
#if defined(__x86_64__)
  const int best = best_allowed();
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl");
#if defined(TESSERA_AMX)
  if (avx512 && best >= 3 && amx_usable()) return amx_kernels();
#endif
  if (avx512 && best >= 2) return avx512_kernels();
  if (avx2 && best >= 1) return kAvx2Kernels;
#endif
  return kScalarKernels;
}

}  // namespace

const CpuKernels& cpu_kernels() {
  static const CpuKernels& chosen = choose();
  return chosen;
}

}  // namespace tessera

// For kernels/libraries.py, which calls it without torch.
extern "C" const char* tessera_cpu_kernels() { return tessera::cpu_kernels().name; }
