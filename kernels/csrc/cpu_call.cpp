// See cpu_call.h: every size is checked here and every id resolved.
#include "cpu_call.h"

#include "binding_checks.h"
#include "huge_pages.h"
#include "ids.h"
#include "row_overlay.h"

namespace tessera {
namespace {

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
    TORCH_CHECK((p.weight_type == kBlockInt8) == (p.scale_type == kScaleBook), "plan: feature ", f,
                " has a scale book without blocks, or blocks without a book");
    TORCH_CHECK(static_cast<uint64_t>(p.reciprocal) == ~uint64_t{0} / static_cast<uint64_t>(p.rows),
                "plan: feature ", f, " has a reciprocal that does not fit its ", p.rows, " rows");
    TORCH_CHECK(region_fits(p.data_offset, p.row_stride, p.rows,
                            row_data_bytes(p.weight_type, p.dim), bytes) &&
                    (p.scale_type == kNoScale || region_fits(p.scale_offset, p.scale_stride,
                                                             ((p.rows - 1) >> p.scale_shift) + 1,
                                                             scale_bytes(p.scale_type), bytes)),
                "plan: feature ", f, " reaches outside the weights' ", bytes, " bytes");
    TORCH_CHECK(p.out_column >= 0 && p.dim <= width && p.out_column <= width - p.dim,
                "plan: feature ", f, " writes columns ", p.out_column, " to ", p.out_column + p.dim,
                " of ", width);
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
    const int64_t row =
        resolve_id(ids[i], plan.rows, plan.id_rule, plan.out_of_range, reciprocal, &outside);
    rows[i] = row < 0 ? kSkipped : row;
    starts[i] = row < 0 ? kSkipped : plan.data_offset + row * plan.row_stride;
    count += outside;
  }
  return count;
}

}  // namespace

ThreadScratch& thread_scratch() {
  static thread_local ThreadScratch memory;
  return memory;
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
    if (job.laid != nullptr) job.laid->lay(job.weights, plan, begin, end, rows, starts);
    if (outside != nullptr && count > 0) {
      __atomic_fetch_add(outside + feature, count, __ATOMIC_RELAXED);
    }
    bag = next;
  }
}

Call prepare_bags(const Tensor& weights, const Tensor& plan, const Tensor& indices,
                  const Tensor& lengths, const OptionalTensor& id_weights,
                  const OptionalTensor& outside, bool offsets, int64_t bags, int64_t width) {
  check_id_weights(id_weights, indices);
  check_outside(outside, plan);
  Call call{};
  call.ids = indices.numel();
  LookupJob& job = call.job;
  job.weights = weights.const_data_ptr<uint8_t>();
  job.laid = laid_over(job.weights);
  use_huge_pages_once(job.weights, weights.numel());
  job.plan = reinterpret_cast<const FeaturePlan*>(plan.const_data_ptr<int64_t>());
  job.features = plan.size(0);
  job.id_weights = id_weights.has_value() ? id_weights->const_data_ptr<float>() : nullptr;
  job.out_width = width;
  check_plan(job.plan, job.features, weights.numel(), width);
  job.offsets = prepare_offsets(lengths, offsets, bags, call.ids);
  ThreadScratch& memory = thread_scratch();
  call.rows = scratch(memory.rows, memory.rows_capacity, call.ids);
  job.rows = call.rows;
  call.starts = scratch(memory.starts, memory.starts_capacity, call.ids);
  job.starts = call.starts;
  call.outside = outside.has_value() ? outside->mutable_data_ptr<int64_t>() : nullptr;
  return call;
}

Call prepare(const Tensor& weights, const Tensor& plan, const Tensor& indices,
             const Tensor& lengths, const OptionalTensor& id_weights, const OptionalTensor& outside,
             bool offsets, int64_t width) {
  const Jagged jagged = check_jagged(weights, plan, indices, lengths, offsets);
  Call call = prepare_bags(weights, plan, indices, lengths, id_weights, outside, offsets,
                           jagged.features * jagged.batch, width);
  call.job.batch = jagged.batch;
  return call;
}

}  // namespace tessera
