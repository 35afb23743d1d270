// What launches a kernel of hopper.cuh's instructions: tensor maps, the device, and how tiles are
// shared out.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace tessera {
namespace hopper {

struct Tiles {
  int begin;
  int count;
};

// What block `part` of `parts` has of `tiles`.
__device__ __forceinline__ Tiles tiles_of(int tiles, int part, int parts) {
  const int begin = tiles * part / parts;
  return {begin, tiles * (part + 1) / parts - begin};
}

using Encode = decltype(&cuTensorMapEncodeTiled);

// The driver's function; null where there is none.
inline Encode encode() {
  static const Encode found = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result{};
    const cudaError_t status = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                                12000, cudaEnableDefault, &result);
    const bool is_there = status == cudaSuccess && result == cudaDriverEntryPointSuccess;
    return is_there ? reinterpret_cast<Encode>(function) : nullptr;
  }();
  return found;
}

inline bool make_map(CUtensorMap* map, CUtensorMapDataType type, const void* from, int dimensions,
                     const cuuint64_t* sizes, const cuuint64_t* strides_bytes,
                     const cuuint32_t* box) {
  constexpr cuuint32_t kEach[5] = {1, 1, 1, 1, 1};
  return encode() != nullptr &&
         encode()(map, type, static_cast<cuuint32_t>(dimensions), const_cast<void*>(from), sizes,
                  strides_bytes, box, kEach, CU_TENSOR_MAP_INTERLEAVE_NONE,
                  CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// The device's multiprocessors where its compute capability is 9.0 and Kernel's blocks may have
// SharedBytes; otherwise 0.  Asked once per device and thread.
template <auto Kernel, int SharedBytes>
int multiprocessors(int device) {
  static thread_local int known = -1;
  static thread_local int count = 0;
  if (device == known) return count;
  int major = 0;
  count = 0;
  // Code made for an older generation would be compiled for this one by the driver, with an empty
  // body.
  cudaFuncAttributes code{};
  const bool is_hopper =
      cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
      major == 9 && cudaFuncGetAttributes(&code, Kernel) == cudaSuccess && code.ptxVersion == 90 &&
      cudaFuncSetAttribute(Kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, SharedBytes) ==
          cudaSuccess;
  if (is_hopper) cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  known = device;
  return count;
}

// As many parts of a row of tiles as keep the busiest multiprocessor's work shortest; a part costs
// about two tiles of its own, for fetching v and for the last tile's sums.  No part has more than
// `most` tiles.
inline int64_t best_parts(int64_t blocks, int64_t tiles, int64_t multiprocessors, int64_t most) {
  constexpr int64_t kPartCost = 2;
  int64_t best = tiles;
  int64_t least = INT64_MAX;
  for (int64_t parts = (tiles + most - 1) / most; parts <= tiles; ++parts) {
    const int64_t rounds = (blocks * parts + multiprocessors - 1) / multiprocessors;
    const int64_t cost = rounds * ((tiles + parts - 1) / parts + kPartCost);
    if (cost < least) {
      least = cost;
      best = parts;
    }
  }
  return best;
}

}  // namespace hopper
}  // namespace tessera
