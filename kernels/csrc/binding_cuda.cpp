// The operators on a GPU: checks what can be checked without waiting for the device, then launches
// on torch's current stream.
#include <ATen/ATen.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <algorithm>
#include <cstddef>

#include "binding_checks.h"
#include "cuda_interaction.h"
#include "cuda_lookup.h"
#include "cuda_offsets.h"
#include "cuda_spread.h"

namespace tessera {
namespace {

using at::Tensor;
using OptionalTensor = c10::optional<Tensor>;

constexpr int64_t kMostFeatures = 65534;

void launched(cudaError_t status) {
  TORCH_CHECK(status == cudaSuccess,
              "the lookup kernel was not launched: ", cudaGetErrorString(status));
}

// Bag starts [F * B + 1] from lengths [F * B].
Tensor offsets_of(const Tensor& lengths) {
  const auto options = lengths.options().dtype(at::kLong);
  const Tensor offsets = at::empty({lengths.numel() + 1}, options);
  const Tensor sums = at::empty({offset_sums(lengths.numel())}, options);
  launched(launch_offsets(lengths.const_data_ptr(), lengths.scalar_type() == at::kLong,
                          lengths.numel(), sums.mutable_data_ptr<int64_t>(),
                          offsets.mutable_data_ptr<int64_t>(), c10::cuda::getCurrentCUDAStream()));
  return offsets;
}

// A checked call without its output.  `offsets_owner` keeps computed offsets alive.
CudaLookup prepare(const Tensor& weights, const Tensor& plan, const Tensor& indices,
                   const Tensor& lengths, const OptionalTensor& id_weights,
                   const OptionalTensor& outside, bool given_offsets, int64_t width, int64_t launch,
                   Tensor* offsets_owner) {
  const Jagged jagged = check_jagged(weights, plan, indices, lengths, given_offsets);
  check_id_weights(id_weights, indices);
  check_outside(outside, plan);
  TORCH_CHECK(jagged.features <= kMostFeatures, "plan: ", jagged.features,
              " features are more than ", kMostFeatures);
  TORCH_CHECK(jagged.features * jagged.batch <= kMaxRows,
              "lengths: ", jagged.features * jagged.batch, " bags are more than ", kMaxRows);
  TORCH_CHECK(reinterpret_cast<uintptr_t>(weights.const_data_ptr()) % 16 == 0,
              "weights: they must start on a multiple of 16 bytes");
  *offsets_owner = given_offsets ? lengths : offsets_of(lengths);
  CudaLookup job{};
  job.weights = weights.const_data_ptr<uint8_t>();
  job.weight_bytes = weights.numel();
  job.plan = reinterpret_cast<const FeaturePlan*>(plan.const_data_ptr<int64_t>());
  job.features = jagged.features;
  job.batch = jagged.batch;
  job.indices = indices.const_data_ptr();
  job.ids = indices.numel();
  job.offsets = offsets_owner->const_data_ptr();
  job.wide_ids = indices.scalar_type() == at::kLong;
  job.wide_offsets = offsets_owner->scalar_type() == at::kLong;
  job.id_weights = id_weights.has_value() ? id_weights->const_data_ptr<float>() : nullptr;
  job.out_width = width;
  job.outside = outside.has_value() ? outside->mutable_data_ptr<int64_t>() : nullptr;
  // ops.py, launch_hint: lanes, what the features have in common, their weight type, one width,
  // hashing, one number of shares, uneven columns, wide rows last, parts of blocks.
  job.lanes = std::clamp<int64_t>(launch & 0xff, 0, 32);
  job.alike = static_cast<Alike>(std::clamp<int64_t>(launch >> 8 & 0xff, 0, 3));
  job.weight_type = launch >> 16 & 0xff;
  job.one_width = (launch >> 24 & 1) != 0;
  job.hashed = (launch >> 25 & 1) != 0;
  job.widest_shares = std::clamp<int64_t>(launch & 0xff, 0, kMostShares);
  job.one_share_count = (launch >> 26 & 1) != 0;
  job.uneven_columns = (launch >> 27 & 1) != 0;
  job.wide_last = (launch >> 28 & 1) != 0;
  job.block_parts = launch >> 32 & 0xfffffff;
  return job;
}

void set_out(const Tensor& out, CudaLookup* job) {
  job->out = out.mutable_data_ptr();
  job->out_type = out_type_of(out.scalar_type());
}

// Of the current device; asked once per device and thread.
int multiprocessors() {
  static thread_local int known_device = -1;
  static thread_local int count = 0;
  const int device = c10::cuda::current_device();
  if (device != known_device) {
    launched(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
    known_device = device;
  }
  return count;
}

Tensor lookup(const Tensor& weights, const Tensor& plan, const Tensor& indices,
              const Tensor& lengths, int64_t width, const OptionalTensor& id_weights,
              const OptionalTensor& dense, const OptionalTensor& outside, bool offsets,
              c10::optional<at::ScalarType> dtype, int64_t launch, double scale) {
  const c10::cuda::CUDAGuard guard(weights.device());
  Tensor bag_starts;
  CudaLookup job = prepare(weights, plan, indices, lengths, id_weights, outside, offsets, width,
                           launch, &bag_starts);
  const at::ScalarType type = scaled_scalar_type(dtype, scale);
  Tensor out = at::empty({job.batch, width}, weights.options().dtype(type));
  job.out_scale = static_cast<float>(scale);
  check_dense(dense, out);
  if (dense.has_value()) {
    TORCH_CHECK(dense->stride(1) == 1 || dense->size(1) <= 1, "dense: its rows must be contiguous");
    job.dense = dense->const_data_ptr();
    job.dense_stride = dense->stride(0);
    job.dense_width = dense->size(1);
  }
  set_out(out, &job);
  if (job.batch > 0) {
    launched(launch_lookup(job, multiprocessors(), c10::cuda::getCurrentCUDAStream()));
  }
  return out;
}

void lookup_out(const Tensor& weights, const Tensor& plan, const Tensor& indices,
                const Tensor& lengths, const Tensor& out, const OptionalTensor& id_weights,
                const OptionalTensor& outside, bool offsets, int64_t launch) {
  TORCH_CHECK(out.dim() == 2, "out: two dimensions are needed, got ", out.sizes());
  const c10::cuda::CUDAGuard guard(weights.device());
  Tensor bag_starts;
  CudaLookup job = prepare(weights, plan, indices, lengths, id_weights, outside, offsets,
                           out.size(1), launch, &bag_starts);
  check_out(out, weights, job.batch);
  set_out(out, &job);
  if (job.batch > 0) {
    launched(launch_lookup(job, multiprocessors(), c10::cuda::getCurrentCUDAStream()));
  }
}

void lookup_shared(const Tensor& weights, const Tensor& plan, const Tensor& indices,
                   const Tensor& lengths, const Tensor& sample_rows, const Tensor& out,
                   const OptionalTensor& id_weights, const OptionalTensor& outside, bool offsets,
                   int64_t launch) {
  TORCH_CHECK(out.dim() == 2, "out: two dimensions are needed, got ", out.sizes());
  const c10::cuda::CUDAGuard guard(weights.device());
  check_out(out, weights, out.size(0));
  Tensor bag_starts;
  CudaLookup job = prepare(weights, plan, indices, lengths, id_weights, outside, offsets,
                           out.size(1), launch, &bag_starts);
  check_sample_rows(sample_rows, out, job.batch);
  if (job.batch == 0) return;
  const Tensor pooled = at::empty({job.batch, out.size(1)}, out.options());
  set_out(pooled, &job);
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  launched(launch_lookup(job, multiprocessors(), stream));
  if (out.size(0) == 0) return;
  CudaSpread spread{};
  spread.plan = job.plan;
  spread.features = job.features;
  spread.pooled = pooled.const_data_ptr();
  spread.bags = job.batch;
  spread.sample_rows = sample_rows.const_data_ptr();
  spread.wide = sample_rows.scalar_type() == at::kLong;
  spread.out = out.mutable_data_ptr();
  spread.batch = out.size(0);
  spread.width = out.size(1);
  spread.element_bytes = static_cast<int64_t>(out.element_size());
  launched(launch_spread(spread, stream));
}

Tensor lookup_rows(const Tensor& weights, const Tensor& plan, const Tensor& indices,
                   const Tensor& lengths, int64_t width, const OptionalTensor& outside,
                   bool offsets, c10::optional<at::ScalarType> dtype, int64_t launch) {
  const c10::cuda::CUDAGuard guard(weights.device());
  Tensor bag_starts;
  CudaLookup job = prepare(weights, plan, indices, lengths, c10::nullopt, outside, offsets, width,
                           launch, &bag_starts);
  Tensor out = at::empty({job.ids, width}, weights.options().dtype(out_scalar_type(dtype)));
  set_out(out, &job);
  if (job.ids > 0 && job.batch > 0) {
    launched(launch_lookup_rows(job, multiprocessors(), c10::cuda::getCurrentCUDAStream()));
  }
  return out;
}

CudaInteraction interaction_of(const Tensor& dense, int64_t count, bool upper, const Tensor& out) {
  CudaInteraction job{};
  job.dense = dense.const_data_ptr<float>();
  job.dense_stride = dense.stride(0);
  job.batch = dense.size(0);
  job.count = count;
  job.dim = dense.size(1);
  job.upper = upper;
  job.out = out.mutable_data_ptr<float>();
  return job;
}

Tensor empty_interaction(const Tensor& dense, int64_t count) {
  return at::empty({dense.size(0), dense.size(1) + count * (count + 1) / 2}, dense.options());
}

Tensor dot_interaction(const Tensor& dense, const Tensor& sparse, bool upper) {
  const int64_t count = check_interaction(dense, sparse);
  const c10::cuda::CUDAGuard guard(dense.device());
  Tensor out = empty_interaction(dense, count);
  if (dense.size(0) == 0) return out;
  CudaInteraction job = interaction_of(dense, count, upper, out);
  job.sparse = sparse.const_data_ptr<float>();
  job.sparse_stride = sparse.stride(0);
  launched(launch_interaction(job, c10::cuda::getCurrentCUDAStream()));
  return out;
}

Tensor lookup_dot_interaction(const Tensor& weights, const Tensor& plan, const Tensor& indices,
                              const Tensor& lengths, const Tensor& dense,
                              const OptionalTensor& id_weights, const OptionalTensor& outside,
                              bool offsets, bool upper, int64_t launch) {
  check_matrix(dense, "dense");
  const c10::cuda::CUDAGuard guard(weights.device());
  const int64_t count = plan.size(0);
  const int64_t dim = dense.size(1);
  Tensor bag_starts;
  const CudaLookup fused = prepare(weights, plan, indices, lengths, id_weights, outside, offsets,
                                   count * dim, launch, &bag_starts);
  TORCH_CHECK(dense.size(0) == fused.batch && dense.device() == weights.device() && dim >= 1,
              "dense: ", fused.batch, " rows are needed on ", weights.device(), ", got ",
              dense.sizes(), " on ", dense.device());
  Tensor out = empty_interaction(dense, count);
  if (fused.batch == 0) return out;
  cudaError_t status;
  if (launch_lookup_interaction(fused, interaction_of(dense, count, upper, out),
                                c10::cuda::getCurrentCUDAStream(), &status)) {
    launched(status);
    return out;
  }
  // In two steps, vectors in the order of the features.
  constexpr int64_t kOutColumn = offsetof(FeaturePlan, out_column) / sizeof(int64_t);
  Tensor in_order = plan.clone();
  in_order.select(1, kOutColumn).copy_(at::arange(count, plan.options()).mul_(dim));
  const Tensor pooled = lookup(weights, in_order, indices, bag_starts, count * dim, id_weights,
                               c10::nullopt, outside, true, at::kFloat, launch, 1.0);
  CudaInteraction job = interaction_of(dense, count, upper, out);
  job.sparse = pooled.const_data_ptr<float>();
  job.sparse_stride = pooled.stride(0);
  launched(launch_interaction(job, c10::cuda::getCurrentCUDAStream()));
  return out;
}

}  // namespace
}  // namespace tessera

TORCH_LIBRARY_IMPL(tessera, CUDA, m) {
  m.impl("lookup", tessera::lookup);
  m.impl("lookup_out", tessera::lookup_out);
  m.impl("lookup_shared", tessera::lookup_shared);
  m.impl("lookup_rows", tessera::lookup_rows);
  m.impl("dot_interaction", tessera::dot_interaction);
  m.impl("lookup_dot_interaction", tessera::lookup_dot_interaction);
}
