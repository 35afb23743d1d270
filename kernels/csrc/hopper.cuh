// What Hopper's tensor cores and copy engine need, one function per instruction (PTX ISA, "wgmma",
// "cp.async.bulk.tensor", "mbarrier").  For sm_90a alone.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace tessera {
namespace hopper {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void barrier_init(uint64_t* barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
               "r"(arrivals)
               : "memory");
}

// Counts as an arrival; the phase also waits for so many bytes of copies.
__device__ __forceinline__ void barrier_expect(uint64_t* barrier, uint32_t bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
}

// An arrival at the barrier that stands at the same place in block `rank` of the cluster.  It
// orders no memory beyond this block: a release for the cluster would wait for every store before
// it.
__device__ __forceinline__ void barrier_arrive(uint64_t* barrier, uint32_t rank) {
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
      "}\n" ::"r"(shared_address(barrier)),
      "r"(rank)
      : "memory");
}

// Until the phase of this parity is complete.
__device__ __forceinline__ void barrier_wait(uint64_t* barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

// Barriers of a block by number: `threads` arrive in all, those that sync wait for the others.
__device__ __forceinline__ void named_sync(int number, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_arrive(int number, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

__device__ __forceinline__ void cluster_sync() {
  asm volatile(
      "barrier.cluster.arrive.relaxed.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;\n" ::
          : "memory");
}

// A box of a matrix whose first element is (column, row); its bytes count for `barrier`.
__device__ __forceinline__ void copy_box(void* to, const CUtensorMap* from, uint64_t* barrier,
                                         int column, int row) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4}], [%2];" ::"r"(shared_address(to)),
      "l"(from), "r"(shared_address(barrier)), "r"(column), "r"(row)
      : "memory");
}

// A box of five dimensions, of which three are whole, to every block of the cluster in `blocks`.
__device__ __forceinline__ void copy_box_to(void* to, const CUtensorMap* from, uint64_t* barrier,
                                            int column, int group, uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %5, %5, %5, %4}], [%2], %6;" ::"r"(shared_address(to)),
      "l"(from), "r"(shared_address(barrier)), "r"(column), "r"(group), "r"(0), "h"(blocks)
      : "memory");
}

// The shared memory operand of a wgmma: rows of 128 bytes, 128-byte swizzle, on 1,024 bytes.
__device__ __forceinline__ uint64_t descriptor(uint32_t address) {
  constexpr uint64_t kEightRows = 1024 >> 4;
  return static_cast<uint64_t>((address & 0x3FFFF) >> 4) | uint64_t{1} << 16 | kEightRows << 32 |
         uint64_t{1} << 62;
}

__device__ __forceinline__ void mma_begin() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void mma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Until at most `kPending` committed groups are not complete.
template <int kPending>
__device__ __forceinline__ void mma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

template <int kRegisters>
__device__ __forceinline__ void more_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void fewer_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

#define TESSERA_SUMS_64                                                              \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "          \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
#define TESSERA_EIGHT(sums, k)                                                               \
  "+f"(sums[k]), "+f"(sums[k + 1]), "+f"(sums[k + 2]), "+f"(sums[k + 3]), "+f"(sums[k + 4]), \
      "+f"(sums[k + 5]), "+f"(sums[k + 6]), "+f"(sums[k + 7])
#define TESSERA_SIXTY_FOUR(sums)                                                 \
  TESSERA_EIGHT(sums, 0), TESSERA_EIGHT(sums, 8), TESSERA_EIGHT(sums, 16),       \
      TESSERA_EIGHT(sums, 24), TESSERA_EIGHT(sums, 32), TESSERA_EIGHT(sums, 40), \
      TESSERA_EIGHT(sums, 48), TESSERA_EIGHT(sums, 56)

// sums [64 x 128] += a [64 x 16] b' [16 x 128], bfloat16; `keep` false: from zero.
__device__ __forceinline__ void mma_64x128x16(float (&sums)[64], uint64_t a, uint64_t b,
                                              bool keep) {
  asm volatile(
      "{\n"
      ".reg .pred keep;\n"
      "setp.ne.b32 keep, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 " TESSERA_SUMS_64
      "%64, %65, keep, 1, 1, 0, 0;\n"
      "}\n"
      : TESSERA_SIXTY_FOUR(sums)
      : "l"(a), "l"(b), "r"(static_cast<int>(keep)));
}

// sums [64 x 128] += a [64 x 32] b' [32 x 128], e4m3.  The tensor core keeps about 14 bits of what
// it adds up.
__device__ __forceinline__ void mma_64x128x32(float (&sums)[64], uint64_t a, uint64_t b,
                                              bool keep) {
  asm volatile(
      "{\n"
      ".reg .pred keep;\n"
      "setp.ne.b32 keep, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 " TESSERA_SUMS_64
      "%64, %65, keep, 1, 1;\n"
      "}\n"
      : TESSERA_SIXTY_FOUR(sums)
      : "l"(a), "l"(b), "r"(static_cast<int>(keep)));
}

#undef TESSERA_SUMS_64
#undef TESSERA_EIGHT
#undef TESSERA_SIXTY_FOUR

}  // namespace hopper
}  // namespace tessera
