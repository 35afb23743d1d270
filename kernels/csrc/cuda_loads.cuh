// What a thread of the streaming kernels loads: ids and offsets of either width, scales, and bytes
// of rows by asynchronous copies; and how an id becomes a row.
#pragma once

#include "cuda_decode.cuh"
#include "cuda_lookup.h"
#include "ids.h"

namespace tessera {
namespace {

__device__ __forceinline__ int64_t load_integer(const void* values, int64_t at, bool wide) {
  return wide ? __ldg(static_cast<const int64_t*>(values) + at)
              : __ldg(static_cast<const int32_t*>(values) + at);
}

// An id as it was loaded.  Widening it at once would wait for the load; that happens when the id
// is used, one step later.
template <bool Wide>
struct RawId;

template <>
struct RawId<false> {
  int32_t bits;

  __device__ __forceinline__ void load(const uint8_t* ids, int at) {
    bits = __ldg(reinterpret_cast<const int32_t*>(ids) + at);
  }
  __device__ __forceinline__ int64_t value() const { return bits; }
  __device__ __forceinline__ uint32_t nearest_row(uint32_t rows) const {
    return static_cast<uint32_t>(min(max(bits, 0), static_cast<int>(rows) - 1));
  }
};

template <>
struct RawId<true> {
  int64_t bits;

  __device__ __forceinline__ void load(const uint8_t* ids, int at) {
    bits = __ldg(reinterpret_cast<const int64_t*>(ids) + at);
  }
  __device__ __forceinline__ int64_t value() const { return bits; }
  __device__ __forceinline__ uint32_t nearest_row(uint32_t rows) const {
    const uint32_t nearest = bits < 0 ? 0 : rows - 1;
    return static_cast<uint64_t>(bits) < rows ? static_cast<uint32_t>(bits) : nearest;
  }
};

// An offset, kept inside the ids whatever the caller sent.
__device__ __forceinline__ int64_t inside_ids(const CudaLookup& job, int64_t offset) {
  return min(max(offset, int64_t{0}), job.ids);
}

__device__ __forceinline__ int64_t load_offset(const CudaLookup& job, int64_t bag) {
  return inside_ids(job, load_integer(job.offsets, bag, job.wide_offsets));
}

__device__ __forceinline__ uint32_t shared_address(const void* at) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(at));
}

// Keeps: in the first cache, too, as pieces of less than 16 bytes always are.
template <int Bytes, bool Keeps = false>
__device__ __forceinline__ void copy_async(uint32_t to, const uint8_t* from) {
  if constexpr (Bytes == 16 && !Keeps) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(Bytes)
                 : "memory");
  }
}

// Copies 4 bytes if it is `wanted`: one instruction, where threads of a warp differ in that.
__device__ __forceinline__ void copy_word_async(uint32_t to, const uint8_t* from, bool wanted) {
  asm volatile(
      "{\n"
      "  .reg .pred wanted;\n"
      "  setp.ne.u32 wanted, %2, 0;\n"
      "  @wanted cp.async.ca.shared.global [%0], [%1], 4;\n"
      "}" ::"r"(to),
      "l"(from), "r"(static_cast<uint32_t>(wanted))
      : "memory");
}

__device__ __forceinline__ float2 half_pair(uint32_t bits) {
  return make_float2(half_bits_to_float(bits & 0xffffu), half_bits_to_float(bits >> 16));
}

// Scale and bias of a row, of any type and alignment.
__device__ float2 load_scale(const FeaturePlan& plan, const uint8_t* scales, uint32_t row) {
  const uint8_t* at = scales + static_cast<int64_t>(row >> plan.scale_shift) * plan.scale_stride;
  if (plan.scale_type == kHalfScale) {
    return make_float2(decode_column(kFloat16, at, 0), decode_column(kFloat16, at, 1));
  }
  return make_float2(decode_column(kFloat32, at, 0), decode_column(kFloat32, at, 1));
}

// The row of a raw id or -1; counts it once per group when it is outside the table.
__device__ __forceinline__ int32_t resolve(const CudaLookup& job, const FeaturePlan& plan,
                                           int feature, int64_t id, bool counts) {
  bool outside;
  const int64_t row = resolve_id(id, plan.rows, plan.id_rule, plan.out_of_range,
                                 static_cast<uint64_t>(plan.reciprocal), &outside);
  if (outside && counts && job.outside != nullptr) {
    atomicAdd(reinterpret_cast<unsigned long long*>(job.outside + feature), 1ULL);
  }
  return static_cast<int32_t>(row);
}

}  // namespace
}  // namespace tessera
