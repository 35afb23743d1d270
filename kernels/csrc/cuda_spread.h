// Copies vectors that were looked up once to every sample that shares them: plain pointers and a
// stream, no torch header.
#pragma once

#include "cuda_lookup.h"

namespace tessera {

struct CudaSpread {
  const FeaturePlan* plan;  // [features]; its columns are copied
  int64_t features;         // 1 to 65,534
  const void* pooled;       // [bags, width]
  int64_t bags;             // >= 1
  const void*
      sample_rows;  // [batch], int64 when wide, else int32; a wrong one takes the nearest bag
  bool wide;
  void* out;              // [batch, width]
  int64_t batch;          // >= 1
  int64_t width;          // elements
  int64_t element_bytes;  // 2 or 4
};

cudaError_t launch_spread(const CudaSpread& job, cudaStream_t stream);

}  // namespace tessera
