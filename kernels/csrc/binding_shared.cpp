// Lookups on the CPU whose bags several samples share: each bag is looked up once, and its vector
// copied to the samples that use it.
#include <torch/library.h>

#include <cstring>
#include <vector>

#include "binding_checks.h"
#include "cpu_call.h"

namespace tessera {
namespace {

// Neighbouring columns that are copied together.
struct Columns {
  int64_t begin;
  int64_t end;
};

// Adds a feature's columns; features in the order of their columns make one run.
void add_columns(std::vector<Columns>& runs, const FeaturePlan& plan) {
  const int64_t begin = plan.out_column;
  if (runs.empty() || runs.back().end != begin) {
    runs.push_back({begin, begin + plan.dim});
  } else {
    runs.back().end += plan.dim;
  }
}

// Copies the columns of bag sample_rows[b] of `pooled` to row b of `out`.
template <class Index>
void spread(const LookupJob& pooled, const std::vector<Columns>& columns, const Index* sample_rows,
            uint8_t* out, int64_t samples) {
  const int64_t element = pooled.out_type == OutType::kFloat32 ? 4 : 2;
  const int64_t stride = pooled.out_width * element;
  at::parallel_for(0, samples, 256, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      const uint8_t* from = static_cast<const uint8_t*>(pooled.out) + sample_rows[b] * stride;
      for (const Columns& run : columns) {
        std::memcpy(out + b * stride + run.begin * element, from + run.begin * element,
                    static_cast<size_t>((run.end - run.begin) * element));
      }
    }
  });
}

void spread(const LookupJob& pooled, const std::vector<Columns>& columns, const Tensor& sample_rows,
            const Tensor& out) {
  uint8_t* to = static_cast<uint8_t*>(out.mutable_data_ptr());
  const int64_t samples = out.size(0);
  sample_rows.scalar_type() == at::kLong
      ? spread(pooled, columns, sample_rows.const_data_ptr<int64_t>(), to, samples)
      : spread(pooled, columns, sample_rows.const_data_ptr<int32_t>(), to, samples);
}

template <class Index>
void check_rows_exist(const Index* sample_rows, int64_t samples, int64_t bags) {
  for (int64_t b = 0; b < samples; ++b) {
    TORCH_CHECK(sample_rows[b] >= 0 && sample_rows[b] < bags, "sample_rows: entry ", b, " is ",
                sample_rows[b], ", but there are ", bags, " bags a feature");
  }
}

void check_rows_exist(const Tensor& sample_rows, int64_t bags) {
  sample_rows.scalar_type() == at::kLong
      ? check_rows_exist(sample_rows.const_data_ptr<int64_t>(), sample_rows.numel(), bags)
      : check_rows_exist(sample_rows.const_data_ptr<int32_t>(), sample_rows.numel(), bags);
}

// Room for `bags` rows of vectors of any type.
void* vectors_of(int64_t bags, int64_t width) {
  ThreadScratch& memory = thread_scratch();
  return scratch(memory.vectors, memory.vectors_capacity, bags * width);
}

void lookup_shared(const Tensor& weights, const Tensor& plan, const Tensor& indices,
                   const Tensor& lengths, const Tensor& sample_rows, const Tensor& out,
                   const OptionalTensor& id_weights, const OptionalTensor& outside, bool offsets,
                   int64_t /*launch*/) {
  TORCH_CHECK(out.dim() == 2, "out: two dimensions are needed, got ", out.sizes());
  check_out(out, weights, out.size(0));
  Call call = prepare(weights, plan, indices, lengths, id_weights, outside, offsets, out.size(1));
  LookupJob& job = call.job;
  check_sample_rows(sample_rows, out, job.batch);
  check_rows_exist(sample_rows, job.batch);
  job.out = vectors_of(job.batch, out.size(1));
  job.out_type = out_type_of(out.scalar_type());
  run_job(call, job, indices, call.ids);
  std::vector<Columns> columns;
  for (int64_t f = 0; f < job.features; ++f) add_columns(columns, job.plan[f]);
  spread(job, columns, sample_rows, out);
}

// How many bags a shared feature has, where the others have `samples` each and `flags` says which
// are shared.
int64_t shared_bags(const Tensor& flags, int64_t features, int64_t samples, int64_t bags) {
  const bool* const shared = flags.const_data_ptr<bool>();
  const int64_t count = std::count(shared, shared + flags.numel(), true);
  const int64_t left = bags - (features - count) * samples;
  TORCH_CHECK(left >= 0 && (count == 0 ? left == 0 : left % count == 0), "lengths: ", bags,
              " entries do not fit ", count, " shared features and ", features - count, " of ",
              samples, " samples");
  return count == 0 ? 0 : left / count;
}

Tensor lookup_partly_shared(const Tensor& weights, const Tensor& plan, const Tensor& indices,
                            const Tensor& lengths, const Tensor& shared, const Tensor& sample_rows,
                            int64_t width, const OptionalTensor& id_weights) {
  check_operands(weights, plan, indices, lengths);
  const int64_t features = plan.size(0);
  TORCH_CHECK(shared.scalar_type() == at::kBool && shared.dim() == 1 && shared.is_contiguous() &&
                  shared.numel() <= features && shared.device() == weights.device(),
              "shared: a contiguous bool vector of at most ", features, " entries is needed, got ",
              shared.scalar_type(), " ", shared.sizes());
  const int64_t samples = sample_rows.numel();
  Tensor out = at::empty({samples, width}, weights.options().dtype(at::kFloat));
  const int64_t bags = shared_bags(shared, features, samples, lengths.numel());
  const bool any = shared.any().item<bool>();
  check_sample_rows(sample_rows, out, any ? bags : 1);
  if (any) check_rows_exist(sample_rows, bags);
  const Call call = prepare_bags(weights, plan, indices, lengths, id_weights, c10::nullopt,
                                 /*offsets=*/false, lengths.numel(), width);
  const bool* const flags = shared.const_data_ptr<bool>();
  const auto is_shared = [&](int64_t f) { return f < shared.numel() && flags[f]; };
  LookupJob pooled = call.job;
  pooled.out = vectors_of(bags, width);
  pooled.out_type = OutType::kFloat32;
  std::vector<Columns> columns;
  // Neighbouring features of one kind are one job.
  for (int64_t begin = 0, bag = 0; begin < features;) {
    int64_t end = begin;
    while (end < features && is_shared(end) == is_shared(begin)) ++end;
    LookupJob job = pooled;
    job.plan = call.job.plan + begin;
    job.features = end - begin;
    job.batch = is_shared(begin) ? bags : samples;
    job.offsets = call.job.offsets + bag;
    if (is_shared(begin)) {
      for (int64_t f = begin; f < end; ++f) add_columns(columns, call.job.plan[f]);
    } else {
      job.out = out.mutable_data_ptr();
    }
    const int64_t last = job.features * job.batch;
    run_job(call, job, indices, job.offsets[last] - job.offsets[0]);
    bag += last;
    begin = end;
  }
  spread(pooled, columns, sample_rows, out);
  return out;
}

}  // namespace
}  // namespace tessera

TORCH_LIBRARY_IMPL(tessera, CPU, m) {
  m.impl("lookup_shared", tessera::lookup_shared);
  m.impl("lookup_partly_shared", tessera::lookup_partly_shared);
}
