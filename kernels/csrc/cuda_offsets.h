// Where bags begin, from how many ids each has, on a GPU: plain pointers and a stream.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace tessera {

// How many sums launch_offsets() needs room for.
int64_t offset_sums(int64_t count);

// offsets[i] = the sum of the first i of `count` lengths, for i up to `count`.
cudaError_t launch_offsets(const void* lengths, bool wide_lengths, int64_t count, int64_t* sums,
                           int64_t* offsets, cudaStream_t stream);

}  // namespace tessera
