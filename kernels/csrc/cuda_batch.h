// What a batch of training goes through on a GPU before its lookups: plain pointers and a stream,
// no torch header.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace tessera {

// The rows of a batch's ids, feature by feature.
struct CudaIdRows {
  const void* ids;  // [count] int64, or int32
  bool wide_ids;
  const void* offsets;  // [features * batch + 1] int64, or int32: where bags begin
  bool wide_offsets;
  int64_t count;           // >= 1
  int64_t features;        // >= 1
  int64_t batch;           // bags of a feature
  const int64_t* rows;     // [features], each in [1, 2^62]
  const int64_t* rules;    // [features], an id rule of ids.h
  const int64_t* outside;  // [features], what an id outside the table becomes, under kIdIsRow
  int64_t* out;            // [count]
};

cudaError_t launch_id_rows(const CudaIdRows& job, cudaStream_t stream);

// Rows of 32-bit words, one behind the other, of which some words are ids.  Bit f of a row's word
// `present` says whether the id of feature f, the unsigned word `first + f`, is there.
struct CudaPackedRows {
  const uint32_t* words;  // [batch, width]
  int64_t batch;          // >= 1
  int64_t width;
  int64_t present;
  int64_t first;
  int64_t features;  // 1 to 32
  int32_t* lengths;  // [features * batch]: 1 where the id is there, otherwise 0
  int64_t* sums;     // [offset_sums(features * batch)]
  int64_t* offsets;  // [features * batch + 1]
  int64_t* values;   // [count]: the ids that are there, feature by feature
  int64_t count;     // no more are written
};

cudaError_t launch_packed_rows(const CudaPackedRows& job, cudaStream_t stream);

// Dense values after some steps of dense_step.h.
struct CudaDenseSteps {
  const float* values;  // [rows, columns], a row's next to each other
  int64_t row_stride;   // numbers from one row to the next
  int64_t rows;         // >= 1
  int64_t columns;      // >= 1
  const double* steps;  // [count, columns, 3]: the kind, and its settings; an unknown kind is none
  int64_t count;
  float* out;  // [rows, columns]
};

cudaError_t launch_dense_steps(const CudaDenseSteps& job, cudaStream_t stream);

}  // namespace tessera
