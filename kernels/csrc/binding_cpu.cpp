// The operators on the CPU: a checked call (cpu_call.h), its output, then the kernels.
#include <torch/library.h>

#include "binding_checks.h"
#include "binding_fp8.h"
#include "cpu_call.h"

namespace tessera {
namespace {

void run_lookup(Call& call, const Tensor& indices, const Tensor& out) {
  call.job.out = out.mutable_data_ptr();
  call.job.out_type = out_type_of(out.scalar_type());
  run_job(call, call.job, indices, call.ids);
}

Tensor lookup(const Tensor& weights, const Tensor& plan, const Tensor& indices,
              const Tensor& lengths, int64_t width, const OptionalTensor& id_weights,
              const OptionalTensor& dense, const OptionalTensor& outside, bool offsets,
              c10::optional<at::ScalarType> dtype, int64_t /*launch*/, double scale) {
  Call call = prepare(weights, plan, indices, lengths, id_weights, outside, offsets, width);
  const at::ScalarType type = scaled_scalar_type(dtype, scale);
  Tensor out = at::empty({call.job.batch, width}, weights.options().dtype(type));
  check_dense(dense, out);
  if (type == at::kFloat8_e4m3fn) {
    // Packages for GPUs alone have such results; here they are made of float32 ones.
    const Tensor pooled = at::zeros({call.job.batch, width}, weights.options().dtype(at::kFloat));
    run_lookup(call, indices, pooled);
    out.copy_(to_float8(pooled.mul_(scale)));
  }
  if (dense.has_value()) out.narrow(1, 0, dense->size(1)).copy_(*dense);
  if (type != at::kFloat8_e4m3fn) run_lookup(call, indices, out);
  return out;
}

void lookup_out(const Tensor& weights, const Tensor& plan, const Tensor& indices,
                const Tensor& lengths, const Tensor& out, const OptionalTensor& id_weights,
                const OptionalTensor& outside, bool offsets, int64_t /*launch*/) {
  TORCH_CHECK(out.dim() == 2, "out: two dimensions are needed, got ", out.sizes());
  Call call = prepare(weights, plan, indices, lengths, id_weights, outside, offsets, out.size(1));
  check_out(out, weights, call.job.batch);
  run_lookup(call, indices, out);
}

Tensor lookup_rows(const Tensor& weights, const Tensor& plan, const Tensor& indices,
                   const Tensor& lengths, int64_t width, const OptionalTensor& outside,
                   bool offsets, c10::optional<at::ScalarType> dtype, int64_t /*launch*/) {
  Call call = prepare(weights, plan, indices, lengths, c10::nullopt, outside, offsets, width);
  for (int64_t f = 0; f < call.job.features; ++f) {
    TORCH_CHECK(call.job.plan[f].dim == width && call.job.plan[f].out_column == 0, "plan: feature ",
                f, " is ", call.job.plan[f].dim, " wide from column ", call.job.plan[f].out_column,
                "; lookup_rows needs ", width, " from 0");
  }
  Tensor out = at::empty({call.ids, width}, weights.options().dtype(out_scalar_type(dtype)));
  call.job.out = out.mutable_data_ptr();
  call.job.out_type = out_type_of(out.scalar_type());
  over_threads(call.ids, call.job.features * call.job.batch, [&](int64_t begin, int64_t end) {
    resolve_bags(call.job, indices, begin, end, call.rows, call.starts, call.outside);
    cpu_kernels().lookup_rows(call.job, begin, end);
  });
  return out;
}

Tensor dot_interaction(const Tensor& dense, const Tensor& sparse, bool upper) {
  const int64_t count = check_interaction(dense, sparse);
  const int64_t dim = dense.size(1);
  const int64_t width = dim + count * (count + 1) / 2;
  Tensor out = at::empty({dense.size(0), width}, dense.options());
  const auto work = [&](int64_t begin, int64_t end) {
    cpu_kernels().dot_interaction(
        dense.const_data_ptr<float>() + begin * dense.stride(0), dense.stride(0),
        sparse.const_data_ptr<float>() + begin * sparse.stride(0), sparse.stride(0), end - begin,
        count, dim, upper, out.mutable_data_ptr<float>() + begin * width);
  };
  constexpr int64_t kSamplesPerThread = 32;
  at::parallel_for(0, dense.size(0), kSamplesPerThread, work);
  return out;
}

Tensor lookup_dot_interaction(const Tensor& weights, const Tensor& plan, const Tensor& indices,
                              const Tensor& lengths, const Tensor& dense,
                              const OptionalTensor& id_weights, const OptionalTensor& outside,
                              bool offsets, bool upper, int64_t /*launch*/) {
  check_matrix(dense, "dense");
  const int64_t dim = dense.size(1);
  const int64_t count = plan.size(0);
  Call call = prepare(weights, plan, indices, lengths, id_weights, outside, offsets, count * dim);
  TORCH_CHECK(dense.size(0) == call.job.batch, "dense: ", call.job.batch, " rows are needed, got ",
              dense.size(0));
  for (int64_t f = 0; f < count; ++f) {
    TORCH_CHECK(call.job.plan[f].dim == dim, "plan: feature ", f, " has dimension ",
                call.job.plan[f].dim, " but the dense vector has ", dim);
  }
  const int64_t width = dim + count * (count + 1) / 2;
  Tensor out = at::empty({call.job.batch, width}, dense.options());
  call.job.out = out.mutable_data_ptr();
  call.job.out_type = OutType::kFloat32;
  // A sample's bags lie in all features, so every id is resolved before the first sample.
  over_threads(call.ids, call.job.features * call.job.batch, [&](int64_t begin, int64_t end) {
    resolve_bags(call.job, indices, begin, end, call.rows, call.starts, call.outside);
  });
  over_threads(call.ids, call.job.batch, [&](int64_t begin, int64_t end) {
    ThreadScratch& memory = thread_scratch();
    float* vectors = scratch(memory.vectors, memory.vectors_capacity, count * dim);
    cpu_kernels().lookup_interaction(call.job, dense.const_data_ptr<float>(), dense.stride(0), dim,
                                     upper, begin, end, vectors);
  });
  return out;
}

}  // namespace
}  // namespace tessera

TORCH_LIBRARY_IMPL(tessera, CPU, m) {
  m.impl("lookup", tessera::lookup);
  m.impl("lookup_out", tessera::lookup_out);
  m.impl("lookup_rows", tessera::lookup_rows);
  m.impl("dot_interaction", tessera::dot_interaction);
  m.impl("lookup_dot_interaction", tessera::lookup_dot_interaction);
}
