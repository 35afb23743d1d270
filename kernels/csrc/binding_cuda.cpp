// The operators on a GPU: checks what can be checked without waiting for the device, then launches
// on torch's current stream.
#include <ATen/ATen.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <algorithm>

#include "binding_checks.h"
#include "cuda_lookup.h"

namespace tessera {
namespace {

using at::Tensor;
using OptionalTensor = c10::optional<Tensor>;

constexpr int64_t kMostFeatures = 65534;

// Bag starts [F * B + 1] from lengths [F * B].
Tensor offsets_of(const Tensor& lengths) {
  Tensor offsets = at::zeros({lengths.numel() + 1}, lengths.options().dtype(at::kLong));
  Tensor ends = offsets.narrow(0, 1, lengths.numel());
  at::cumsum_out(ends, lengths, 0, at::kLong);
  return offsets;
}

// A checked call without its output.  `offsets_owner` keeps computed offsets alive.
CudaLookup prepare(const Tensor& weights, const Tensor& plan, const Tensor& indices,
                   const Tensor& lengths, const OptionalTensor& id_weights,
                   const OptionalTensor& outside, bool given_offsets, int64_t width,
                   int64_t launch, Tensor* offsets_owner) {
  const Jagged jagged = check_jagged(weights, plan, indices, lengths, given_offsets);
  check_id_weights(id_weights, indices);
  check_outside(outside, plan);
  TORCH_CHECK(jagged.features <= kMostFeatures, "plan: ", jagged.features,
              " features are more than ", kMostFeatures);
  TORCH_CHECK(jagged.features * jagged.batch <= kMaxRows, "lengths: ",
              jagged.features * jagged.batch, " bags are more than ", kMaxRows);
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
  // ops.py, launch_hint: lanes, then what the features have in common, then their weight type.
  job.lanes = std::clamp<int64_t>(launch & 0xff, 0, 32);
  job.alike = static_cast<Alike>(std::clamp<int64_t>(launch >> 8 & 0xff, 0, 2));
  job.weight_type = launch >> 16 & 0xff;
  return job;
}

OutType out_type_of(at::ScalarType type) {
  if (type == at::kFloat) return OutType::kFloat32;
  return type == at::kHalf ? OutType::kFloat16 : OutType::kBFloat16;
}

void set_out(const Tensor& out, CudaLookup* job) {
  job->out = out.mutable_data_ptr();
  job->out_type = out_type_of(out.scalar_type());
}

void launched(cudaError_t status) {
  TORCH_CHECK(status == cudaSuccess, "the lookup kernel was not launched: ",
              cudaGetErrorString(status));
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
              c10::optional<at::ScalarType> dtype, int64_t launch) {
  const c10::cuda::CUDAGuard guard(weights.device());
  Tensor bag_starts;
  CudaLookup job = prepare(weights, plan, indices, lengths, id_weights, outside, offsets, width,
                           launch, &bag_starts);
  Tensor out = at::empty({job.batch, width}, weights.options().dtype(out_scalar_type(dtype)));
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

}  // namespace
}  // namespace tessera

TORCH_LIBRARY_IMPL(tessera, CUDA, m) {
  m.impl("lookup", tessera::lookup);
  m.impl("lookup_out", tessera::lookup_out);
  m.impl("lookup_rows", tessera::lookup_rows);
}
