// DLRM's dot interaction, written once over `Vec`; each instruction set includes this file and says
// what computes one sample: interact_by_tiles or interact_by_quarters.
//
// A sample is count + 1 vectors of `dim` floats (dense first).
#pragma once

#include "cpu_kernels.h"

namespace {

// A sample's vectors are read once; asking for the next ones hides what the tiles' jumps between
// vectors do not let the hardware foresee.
inline void prefetch_vectors(const float* vectors, int64_t count) {
  constexpr int64_t kMost = 512;  // lines
  const int64_t bytes = 4 * count < kMost * kLine ? 4 * count : kMost * kLine;
  for (int64_t at = 0; at < bytes; at += kLine) {
    prefetch_line(reinterpret_cast<const uint8_t*>(vectors) + at);
  }
}

template <auto Interact>
void dot_interaction(const float* dense, int64_t dense_stride, const float* sparse,
                     int64_t sparse_stride, int64_t batch, int64_t count, int64_t dim, bool upper,
                     float* out) {
  const int64_t width = dim + (count + 1) * count / 2;
  for (int64_t b = 0; b < batch; ++b) {
    if (b + 1 < batch) prefetch_vectors(sparse + (b + 1) * sparse_stride, count * dim);
    Interact(dense + b * dense_stride, sparse + b * sparse_stride, count, dim, upper,
             out + b * width);
  }
}

constexpr int64_t kSamplePrefetch = 32;  // ids of a bag

// Asks for the rows of every feature's bag of one sample.
inline void prefetch_sample(const LookupJob& job, int64_t sample) {
  for (int64_t f = 0; f < job.features; ++f) {
    const FeaturePlan& plan = job.plan[f];
    const int64_t bag = f * job.batch + sample;
    const int64_t begin = job.offsets[bag];
    const int64_t end = job.offsets[bag + 1];
    const int64_t bytes = tessera::row_data_bytes(plan.weight_type, plan.dim);
    for (int64_t id = begin; id < end && id < begin + kSamplePrefetch; ++id) {
      const int64_t row = job.rows[id];
      if (row == tessera::kSkipped) continue;
      const uint8_t* data = job.weights + plan.data_offset + row * plan.row_stride;
      for (int64_t at = 0; at < bytes; at += kLine) prefetch_line(data + at);
      if (tessera::has_bias(plan.scale_type)) {
        const int64_t scale = row >> plan.scale_shift;
        prefetch_line(job.weights + plan.scale_offset + scale * plan.scale_stride);
      }
    }
  }
}

template <auto Interact>
void lookup_interaction(const LookupJob& job, const float* dense, int64_t dense_stride, int64_t dim,
                        bool upper, int64_t sample_begin, int64_t sample_end, float* scratch) {
  const int64_t count = job.features;
  const int64_t width = dim + (count + 1) * count / 2;
  if (sample_begin < sample_end) prefetch_sample(job, sample_begin);
  for (int64_t b = sample_begin; b < sample_end; ++b) {
    if (b + 1 < sample_end) prefetch_sample(job, b + 1);
    for (int64_t f = 0; f < count; ++f) {
      const FeaturePlan& plan = job.plan[f];
      const int64_t index = f * job.batch + b;
      Bag bag = feature_bag(job, plan);
      take_ids(job, job.offsets[index], job.offsets[index + 1], &bag);
      pool_bag_for(plan.weight_type)(bag, dim, bag_divisor(plan, bag.size), nullptr,
                                     OutType::kFloat32, scratch + f * dim);
    }
    Interact(dense + b * dense_stride, scratch, count, dim, upper,
             static_cast<float*>(job.out) + b * width);
  }
}

}  // namespace
