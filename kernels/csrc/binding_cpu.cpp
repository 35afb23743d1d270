// The operators on the CPU: checks every size, resolves every id, then calls the kernels.
//
// Working memory (offsets, resolved rows) belongs to the calling thread and is kept between calls.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <memory>

#include "binding_checks.h"
#include "cpu_kernels.h"
#include "huge_pages.h"
#include "ids.h"

namespace tessera {
namespace {

using at::Tensor;
using OptionalTensor = c10::optional<Tensor>;

// Under this many ids per thread another thread costs more than it brings.
constexpr int64_t kIdsPerThread = 1024;

// Scratch that grows to the largest call of its thread and is never shrunk.  Unlike a vector it
// leaves its elements unwritten.
template <class T>
T* scratch(std::unique_ptr<T[]>& memory, int64_t& capacity, int64_t count) {
  if (capacity < count) {
    capacity = std::max(count, 2 * capacity);
    memory.reset(new T[static_cast<size_t>(capacity)]);
  }
  return memory.get();
}

struct ThreadScratch {
  std::unique_ptr<int64_t[]> offsets;
  std::unique_ptr<int64_t[]> rows;
  std::unique_ptr<int64_t[]> starts;
  std::unique_ptr<float[]> vectors;  // also as room for elements of 2 bytes
  int64_t offsets_capacity = 0;
  int64_t rows_capacity = 0;
  int64_t starts_capacity = 0;
  int64_t vectors_capacity = 0;
};

ThreadScratch& thread_scratch() {
  static thread_local ThreadScratch memory;
  return memory;
}

// A region of weights that starts at `offset` and holds `rows` strides of at least `bytes`.
bool region_fits(int64_t offset, int64_t stride, int64_t rows, int64_t bytes, int64_t total) {
  if (offset < 0 || stride < 0 || bytes > total || offset > total - bytes) return false;
  return stride == 0 || rows - 1 <= (total - bytes - offset) / stride;
}

void check_plan(const FeaturePlan* plan, int64_t features, int64_t bytes, int64_t width) {
  for (int64_t f = 0; f < features; ++f) {
    const FeaturePlan& p = plan[f];
    const auto under = [](int64_t value, int64_t limit) { return value >= 0 && value < limit; };
    TORCH_CHECK(under(p.weight_type, kWeightTypes) && under(p.scale_type, kScaleTypes) &&
                    under(p.pooling, kPoolings) && under(p.id_rule, kIdRules) &&
                    under(p.out_of_range, kOutOfRanges) && under(p.scale_shift, 63) &&
                    under(p.launch_order, features) && p.dim >= 1 && p.rows >= 1 &&
                    p.rows <= kMaxRows,
                "plan: feature ", f, " has a value that no kernel knows");
    TORCH_CHECK((p.weight_type == kBlockInt8) == (p.scale_type == kScaleBook),
                "plan: feature ", f, " has a scale book without blocks, or blocks without a book");
    TORCH_CHECK(static_cast<uint64_t>(p.reciprocal) ==
                    ~uint64_t{0} / static_cast<uint64_t>(p.rows),
                "plan: feature ", f, " has a reciprocal that does not fit its ", p.rows, " rows");
    TORCH_CHECK(region_fits(p.data_offset, p.row_stride, p.rows,
                            row_data_bytes(p.weight_type, p.dim), bytes) &&
                    (p.scale_type == kNoScale ||
                     region_fits(p.scale_offset, p.scale_stride,
                                 ((p.rows - 1) >> p.scale_shift) + 1,
                                 scale_bytes(p.scale_type), bytes)),
                "plan: feature ", f, " reaches outside the weights' ", bytes, " bytes");
    TORCH_CHECK(p.out_column >= 0 && p.dim <= width && p.out_column <= width - p.dim,
                "plan: feature ", f, " writes columns ", p.out_column, " to ",
                p.out_column + p.dim, " of ", width);
  }
}

template <class T>
void fill_offsets(const T* lengths, int64_t count, int64_t ids, int64_t* offsets) {
  int64_t sum = 0;
  T smallest = 0;
  for (int64_t i = 0; i < count; ++i) {
    offsets[i] = sum;
    smallest = std::min(smallest, lengths[i]);
    sum += lengths[i];
  }
  offsets[count] = sum;
  TORCH_CHECK(smallest >= 0, "lengths: ", smallest, " is negative");
  TORCH_CHECK(sum == ids, "lengths: their sum is ", sum, " but there are ", ids, " indices");
}

template <class T>
void copy_offsets(const T* given, int64_t count, int64_t ids, int64_t* offsets) {
  bool rising = given[0] == 0;
  for (int64_t i = 0; i < count; ++i) {
    offsets[i] = given[i];
    rising &= given[i] <= given[i + 1];
  }
  offsets[count] = given[count];
  TORCH_CHECK(rising, "offsets: they must begin with 0 and never fall");
  TORCH_CHECK(offsets[count] == ids, "offsets: the last is ", offsets[count], " but there are ",
              ids, " indices");
}

const int64_t* prepare_offsets(const Tensor& lengths, bool given_offsets, int64_t bags,
                               int64_t ids) {
  ThreadScratch& memory = thread_scratch();
  int64_t* offsets = scratch(memory.offsets, memory.offsets_capacity, bags + 1);
  if (lengths.scalar_type() == at::kInt) {
    const int32_t* values = lengths.const_data_ptr<int32_t>();
    given_offsets ? copy_offsets(values, bags, ids, offsets)
                  : fill_offsets(values, bags, ids, offsets);
  } else {
    const int64_t* values = lengths.const_data_ptr<int64_t>();
    given_offsets ? copy_offsets(values, bags, ids, offsets)
                  : fill_offsets(values, bags, ids, offsets);
  }
  return offsets;
}

// rows[i] and starts[i] for the ids [begin, end) of one feature; returns how many were outside the
// table.
template <class T>
int64_t resolve_run(const T* ids, int64_t begin, int64_t end, const FeaturePlan& plan,
                    int64_t* rows, int64_t* starts) {
  int64_t count = 0;
  const auto reciprocal = static_cast<uint64_t>(plan.reciprocal);
  for (int64_t i = begin; i < end; ++i) {
    bool outside;
    rows[i] = resolve_id(ids[i], plan.rows, plan.id_rule, plan.out_of_range, reciprocal, &outside);
    starts[i] = rows[i] < 0 ? -1 : plan.data_offset + rows[i] * plan.row_stride;
    count += outside;
  }
  return count;
}

// Resolves the ids of bags [bag_begin, bag_end).  Several threads may work on other bags.
void resolve_bags(const LookupJob& job, const Tensor& indices, int64_t bag_begin, int64_t bag_end,
                  int64_t* rows, int64_t* starts, int64_t* outside) {
  for (int64_t bag = bag_begin; bag < bag_end;) {
    const int64_t feature = bag / job.batch;
    const int64_t next = std::min((feature + 1) * job.batch, bag_end);
    const FeaturePlan& plan = job.plan[feature];
    const int64_t begin = job.offsets[bag];
    const int64_t end = job.offsets[next];
    const int64_t count =
        indices.scalar_type() == at::kInt
            ? resolve_run(indices.const_data_ptr<int32_t>(), begin, end, plan, rows, starts)
            : resolve_run(indices.const_data_ptr<int64_t>(), begin, end, plan, rows, starts);
    if (outside != nullptr && count > 0) {
      __atomic_fetch_add(outside + feature, count, __ATOMIC_RELAXED);
    }
    bag = next;
  }
}

OutType out_type_of(at::ScalarType type) {
  if (type == at::kFloat) return OutType::kFloat32;
  return type == at::kHalf ? OutType::kFloat16 : OutType::kBFloat16;
}

// A checked call: the job without its output, and where resolved rows and counts go.
struct Call {
  LookupJob job;
  int64_t* rows;
  int64_t* starts;
  int64_t* outside;
  int64_t ids;
};

Call prepare(const Tensor& weights, const Tensor& plan, const Tensor& indices,
             const Tensor& lengths, const OptionalTensor& id_weights,
             const OptionalTensor& outside, bool offsets, int64_t width) {
  const Jagged jagged = check_jagged(weights, plan, indices, lengths, offsets);
  check_id_weights(id_weights, indices);
  check_outside(outside, plan);
  Call call{};
  call.ids = indices.numel();
  LookupJob& job = call.job;
  job.weights = weights.const_data_ptr<uint8_t>();
  use_huge_pages_once(job.weights, weights.numel());
  job.plan = reinterpret_cast<const FeaturePlan*>(plan.const_data_ptr<int64_t>());
  job.features = jagged.features;
  job.batch = jagged.batch;
  job.id_weights = id_weights.has_value() ? id_weights->const_data_ptr<float>() : nullptr;
  job.out_width = width;
  check_plan(job.plan, job.features, weights.numel(), width);
  job.offsets = prepare_offsets(lengths, offsets, job.features * job.batch, call.ids);
  ThreadScratch& memory = thread_scratch();
  call.rows = scratch(memory.rows, memory.rows_capacity, call.ids);
  job.rows = call.rows;
  call.starts = scratch(memory.starts, memory.starts_capacity, call.ids);
  job.starts = call.starts;
  call.outside = outside.has_value() ? outside->mutable_data_ptr<int64_t>() : nullptr;
  return call;
}

// Runs `work(begin, end)` over [0, count) on as many threads as torch was given and the ids are
// worth.
template <class Work>
void over_threads(const Call& call, int64_t count, const Work& work) {
  const int64_t threads =
      std::min<int64_t>(at::get_num_threads(), 1 + call.ids / kIdsPerThread);
  if (threads <= 1) {
    work(0, count);
    return;
  }
  at::parallel_for(0, count, (count + threads - 1) / threads, work);
}

void run_lookup(Call& call, const Tensor& indices, const Tensor& out) {
  call.job.out = out.mutable_data_ptr();
  call.job.out_type = out_type_of(out.scalar_type());
  over_threads(call, call.job.features * call.job.batch, [&](int64_t begin, int64_t end) {
    resolve_bags(call.job, indices, begin, end, call.rows, call.starts, call.outside);
    cpu_kernels().lookup(call.job, begin, end);
  });
}

Tensor lookup(const Tensor& weights, const Tensor& plan, const Tensor& indices,
              const Tensor& lengths, int64_t width, const OptionalTensor& id_weights,
              const OptionalTensor& dense, const OptionalTensor& outside, bool offsets,
              c10::optional<at::ScalarType> dtype, int64_t /*launch*/) {
  Call call = prepare(weights, plan, indices, lengths, id_weights, outside, offsets, width);
  Tensor out = at::empty({call.job.batch, width}, weights.options().dtype(out_scalar_type(dtype)));
  check_dense(dense, out);
  if (dense.has_value()) out.narrow(1, 0, dense->size(1)).copy_(*dense);
  run_lookup(call, indices, out);
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

// Copies each feature's columns of bag sample_rows[b] of `pooled` to row b of `out`.
template <class Index>
void spread(const LookupJob& pooled, const Index* sample_rows, uint8_t* out, int64_t samples) {
  const int64_t element = pooled.out_type == OutType::kFloat32 ? 4 : 2;
  const int64_t stride = pooled.out_width * element;
  at::parallel_for(0, samples, 256, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      const uint8_t* from = static_cast<const uint8_t*>(pooled.out) + sample_rows[b] * stride;
      for (int64_t f = 0; f < pooled.features; ++f) {
        const int64_t at = pooled.plan[f].out_column * element;
        std::memcpy(out + b * stride + at, from + at,
                    static_cast<size_t>(pooled.plan[f].dim * element));
      }
    }
  });
}

template <class Index>
void check_rows_exist(const Index* sample_rows, int64_t samples, int64_t bags) {
  for (int64_t b = 0; b < samples; ++b) {
    TORCH_CHECK(sample_rows[b] >= 0 && sample_rows[b] < bags, "sample_rows: entry ", b, " is ",
                sample_rows[b], ", but there are ", bags, " bags a feature");
  }
}

void lookup_shared(const Tensor& weights, const Tensor& plan, const Tensor& indices,
                   const Tensor& lengths, const Tensor& sample_rows, const Tensor& out,
                   const OptionalTensor& id_weights, const OptionalTensor& outside, bool offsets,
                   int64_t /*launch*/) {
  TORCH_CHECK(out.dim() == 2, "out: two dimensions are needed, got ", out.sizes());
  const int64_t samples = out.size(0);
  check_out(out, weights, samples);
  Call call = prepare(weights, plan, indices, lengths, id_weights, outside, offsets, out.size(1));
  LookupJob& job = call.job;
  check_sample_rows(sample_rows, out, job.batch);
  const bool wide = sample_rows.scalar_type() == at::kLong;
  wide ? check_rows_exist(sample_rows.const_data_ptr<int64_t>(), samples, job.batch)
       : check_rows_exist(sample_rows.const_data_ptr<int32_t>(), samples, job.batch);
  ThreadScratch& memory = thread_scratch();
  job.out = scratch(memory.vectors, memory.vectors_capacity, job.batch * out.size(1));
  job.out_type = out_type_of(out.scalar_type());
  over_threads(call, job.features * job.batch, [&](int64_t begin, int64_t end) {
    resolve_bags(job, indices, begin, end, call.rows, call.starts, call.outside);
    cpu_kernels().lookup(job, begin, end);
  });
  uint8_t* to = static_cast<uint8_t*>(out.mutable_data_ptr());
  wide ? spread(job, sample_rows.const_data_ptr<int64_t>(), to, samples)
       : spread(job, sample_rows.const_data_ptr<int32_t>(), to, samples);
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
  over_threads(call, call.job.features * call.job.batch, [&](int64_t begin, int64_t end) {
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
    cpu_kernels().dot_interaction(dense.const_data_ptr<float>() + begin * dense.stride(0),
                                  dense.stride(0),
                                  sparse.const_data_ptr<float>() + begin * sparse.stride(0),
                                  sparse.stride(0), end - begin, count, dim, upper,
                                  out.mutable_data_ptr<float>() + begin * width);
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
  Call call =
      prepare(weights, plan, indices, lengths, id_weights, outside, offsets, count * dim);
  TORCH_CHECK(dense.size(0) == call.job.batch, "dense: ", call.job.batch,
              " rows are needed, got ", dense.size(0));
  for (int64_t f = 0; f < count; ++f) {
    TORCH_CHECK(call.job.plan[f].dim == dim, "plan: feature ", f, " has dimension ",
                call.job.plan[f].dim, " but the dense vector has ", dim);
  }
  const int64_t width = dim + count * (count + 1) / 2;
  Tensor out = at::empty({call.job.batch, width}, dense.options());
  call.job.out = out.mutable_data_ptr();
  call.job.out_type = OutType::kFloat32;
  // A sample's bags lie in all features, so every id is resolved before the first sample.
  over_threads(call, call.job.features * call.job.batch, [&](int64_t begin, int64_t end) {
    resolve_bags(call.job, indices, begin, end, call.rows, call.starts, call.outside);
  });
  over_threads(call, call.job.batch, [&](int64_t begin, int64_t end) {
    ThreadScratch& memory = thread_scratch();
    float* vectors = scratch(memory.vectors, memory.vectors_capacity, count * dim);
    cpu_kernels().lookup_interaction(call.job, dense.const_data_ptr<float>(), dense.stride(0),
                                     dim, upper, begin, end, vectors);
  });
  return out;
}

}  // namespace
}  // namespace tessera

TORCH_LIBRARY_IMPL(tessera, CPU, m) {
  m.impl("lookup", tessera::lookup);
  m.impl("lookup_out", tessera::lookup_out);
  m.impl("lookup_shared", tessera::lookup_shared);
  m.impl("lookup_rows", tessera::lookup_rows);
  m.impl("dot_interaction", tessera::dot_interaction);
  m.impl("lookup_dot_interaction", tessera::lookup_dot_interaction);
}
