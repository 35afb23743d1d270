// The CUDA kernels' interface: plain pointers and a stream, no torch header.
//
// Both functions only launch: they return at once with cudaGetLastError().  All pointers are
// device pointers that must stay valid until the stream has passed the launch.  Ids may hold any
// value: no id leads outside its table, and a bag's ids are taken from [0, ids) even where offsets
// are wrong.  The plan is trusted (tables.py builds it, the CPU binding's checks describe it).
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "plan.h"

namespace tessera {

// What the features of a plan have in common, as far as the caller knows without reading it.  A
// wrong answer costs time, not values.
enum class Alike : int32_t {
  kNo,
  kOneScale,  // one weight type, and one scale per table or none
  kRowScale,  // one weight type, and fp16 scales per row or per few rows
  kBook,      // kBlockInt8
};

constexpr int64_t kBlockParts = 2048;
constexpr int64_t kMostShares = 128;  // that a hint tells of

struct CudaLookup {
  const uint8_t* weights;  // 16-byte aligned
  int64_t weight_bytes;
  const FeaturePlan* plan;  // [features]
  int64_t features;         // F, 1 to 65,534
  int64_t batch;            // B >= 1; F * B < 2^31
  const void* indices;      // [ids], int64 when wide_ids, else int32
  int64_t ids;
  const void* offsets;  // [F * B + 1], int64 when wide_offsets, else int32
  bool wide_ids;
  bool wide_offsets;
  OutType out_type;
  float out_scale;          // what values are multiplied by under OutType::kFloat8
  const float* id_weights;  // [ids] or nullptr
  void* out;                // [B, out_width], or [ids, out_width] for rows
  int64_t out_width;        // elements
  const void* dense;        // [B, dense_width] of the output's type or nullptr: columns [0, ...)
  int64_t dense_stride;     // elements
  int64_t dense_width;
  int64_t* outside;  // [F] counts of ids outside their table, or nullptr
  int64_t lanes;     // threads of the widest bag (1 to 32; 0: unknown); values never depend on it
  Alike alike;
  int64_t weight_type;  // of all features, unless alike is kNo
  bool hashed;          // every id has a row, but not by clamping (a feature's rule says how)
  bool one_width;       // every feature is summed and exactly `lanes` whole shares wide
  // The hint about widths, for cuda_widths.cuh: shares of the widest row, at most kMostShares,
  // whether a row of every feature has as many, and what a bag of every feature takes of blocks of
  // 128 threads, in kBlockParts.  0, 0 and false: unknown.
  int64_t widest_shares;
  int64_t block_parts;
  bool one_share_count;
  // Some feature's columns of the output begin or end between multiples of eight; false: unknown.
  bool uneven_columns;
  // Widths differ, and among the last features is one of nearly the widest rows; false: unknown.
  bool wide_last;
};

// Pooled: every column of a bag is written, zeros for an empty one.
cudaError_t launch_lookup(const CudaLookup& job, int multiprocessors, cudaStream_t stream);

// Unpooled: the vector of id i to row i.
cudaError_t launch_lookup_rows(const CudaLookup& job, int multiprocessors, cudaStream_t stream);

}  // namespace tessera
