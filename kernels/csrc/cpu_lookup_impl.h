// The lookup kernels, written once over `Vec`; each instruction set includes this file.
//
// A bag is summed in the order of its ids, one register per Vec::kWidth columns: for each id
//   acc[column] = fma(weight * scale, q[column], acc[column]);  bias += weight * row_bias
// and the bag's value is (acc + bias), divided by the number of ids under mean.  So every
// instruction set gives the same bits.
//
// Cold rows are the cost: each takes cache misses and a page walk.  A Prefetcher (cpu_prefetch.h)
// runs in front of the sum, across the ends of bags and features.
#pragma once

#include <iterator>

#include "cpu_fixed_impl.h"

namespace {

// Vectors of one register block: 8 accumulators and their addresses fit any instruction set.
constexpr int kBlock = 8;

// Sums N vectors of columns (or, with `count` > 0, one vector's first `count` columns).
template <int64_t T, int N>
inline float sum_columns(const Bag& bag, int64_t column, int64_t count, Prefetcher* prefetcher,
                         Vec (&acc)[N]) {
  float bias_sum = 0.0f;
  for (int k = 0; k < N; ++k) acc[k] = Vec::zero();
  for (int64_t i = 0; i < bag.size; ++i) {
    if (prefetcher != nullptr) prefetcher->step();
    const int64_t row = bag.rows[i];
    if (row == tessera::kSkipped) continue;
    float factor = bag.weights == nullptr ? 1.0f : bag.weights[i];
    if (tessera::has_bias(bag.scale_type)) {
      float scale;
      float bias;
      load_scale(bag, row, &scale, &bias);
      bias_sum += factor * bias;
      factor *= scale;
    }
    const Vec scales = Vec::set(factor);
    const uint8_t* data = bag.data + row * bag.row_stride;
    if (count > 0) {
      acc[0] = fma(column_scales<T>(bag.scale, data, column, factor, scales),
                   load_some_weights<T>(data, column, count), acc[0]);
    } else {
      for (int k = 0; k < N; ++k) {
        const int64_t at = column + k * Vec::kWidth;
        acc[k] = fma(column_scales<T>(bag.scale, data, at, factor, scales),
                     load_weights<T>(data, at), acc[k]);
      }
    }
  }
  return bias_sum;
}

inline void store_columns(OutType type, Vec value, void* out, int64_t column, int64_t count) {
  float copy[Vec::kWidth];
  uint16_t half_copy[Vec::kWidth];
  if (type == OutType::kFloat32) {
    float* to = static_cast<float*>(out) + column;
    if (count == 0) return value.store(to);
    value.store(copy);
    std::memcpy(to, copy, static_cast<size_t>(4 * count));
    return;
  }
  uint16_t* to = static_cast<uint16_t*>(out) + column;
  uint16_t* target = count == 0 ? to : half_copy;
  if (type == OutType::kFloat16) {
    value.store_half(target);
  } else {
    value.store_bfloat(target);
  }
  if (count > 0) std::memcpy(to, half_copy, static_cast<size_t>(2 * count));
}

template <int64_t T, int N>
inline void pool_columns(const Bag& bag, int64_t column, int64_t count, float divisor,
                         Prefetcher* prefetcher, OutType type, void* out) {
  Vec acc[N];
  const Vec bias = Vec::set(sum_columns<T, N>(bag, column, count, prefetcher, acc));
  const bool quantized = tessera::has_bias(bag.scale_type);
  for (int k = 0; k < N; ++k) {
    if (quantized) acc[k] = add(acc[k], bias);
    if (divisor != 1.0f) acc[k] = divide(acc[k], Vec::set(divisor));
    store_columns(type, acc[k], out, column + k * Vec::kWidth, count);
  }
}

// One bag: all columns, written to `out` (the bag's first column).  The prefetcher steps once per
// id, in the first block of columns.
template <int64_t T>
inline void pool_bag(const Bag& bag, int64_t dim, float divisor, Prefetcher* prefetcher,
                     OutType type, void* out) {
  constexpr int64_t kWidth = Vec::kWidth;
  int64_t column = 0;
  const auto next_prefetcher = [&] { return column == 0 ? prefetcher : nullptr; };
  while (dim - column >= kBlock * kWidth) {
    pool_columns<T, kBlock>(bag, column, 0, divisor, next_prefetcher(), type, out);
    column += kBlock * kWidth;
  }
  if (dim - column >= 4 * kWidth) {
    pool_columns<T, 4>(bag, column, 0, divisor, next_prefetcher(), type, out);
    column += 4 * kWidth;
  }
  if (dim - column >= 2 * kWidth) {
    pool_columns<T, 2>(bag, column, 0, divisor, next_prefetcher(), type, out);
    column += 2 * kWidth;
  }
  if (dim - column >= kWidth) {
    pool_columns<T, 1>(bag, column, 0, divisor, next_prefetcher(), type, out);
    column += kWidth;
  }
  if (dim > column) {
    pool_columns<T, 1>(bag, column, dim - column, divisor, next_prefetcher(), type, out);
  }
}

using PoolBag = void (*)(const Bag&, int64_t, float, Prefetcher*, OutType, void*);

inline PoolBag pool_bag_for(int64_t weight_type) {
#define TESSERA_POOL_BAG(type) pool_bag<tessera::type>,
  static constexpr PoolBag kByType[] = {TESSERA_WEIGHT_TYPES(TESSERA_POOL_BAG)};
#undef TESSERA_POOL_BAG
  static_assert(std::size(kByType) == tessera::kWeightTypes, "one for each weight type");
  return kByType[weight_type];
}

inline float bag_divisor(const FeaturePlan& plan, int64_t size) {
  return plan.pooling == tessera::kMean && size > 1 ? static_cast<float>(size) : 1.0f;
}

inline void* element(void* base, OutType type, int64_t index) {
  return static_cast<uint8_t*>(base) + index * (type == OutType::kFloat32 ? 4 : 2);
}

// Bags [begin, end) of one feature.
template <int64_t T>
void pool_bags(const LookupJob& job, const FeaturePlan& plan, int64_t feature, int64_t begin,
               int64_t end, Prefetcher* prefetcher) {
  prefetcher->enter(plan);
  if (fixed_serves<T>(job, plan)) {
    switch (plan.dim) {
      case 2 * Vec::kWidth:
        return pool_fixed_feature<T, 2>(job, plan, feature, begin, end, prefetcher);
      case 4 * Vec::kWidth:
        return pool_fixed_feature<T, 4>(job, plan, feature, begin, end, prefetcher);
      case 8 * Vec::kWidth:
        return pool_fixed_feature<T, 8>(job, plan, feature, begin, end, prefetcher);
      default: break;
    }
  }
  Bag bag = feature_bag(job, plan);
  const int64_t* const offsets = job.offsets + feature * job.batch;
  for (int64_t b = begin; b < end; ++b) {
    take_ids(job, offsets[b], offsets[b + 1], &bag);
    pool_bag<T>(bag, plan.dim, bag_divisor(plan, bag.size), prefetcher, job.out_type,
                element(job.out, job.out_type, b * job.out_width + plan.out_column));
  }
}

using PoolBags = void (*)(const LookupJob&, const FeaturePlan&, int64_t, int64_t, int64_t,
                          Prefetcher*);

inline PoolBags pool_bags_for(int64_t weight_type) {
#define TESSERA_POOL_BAGS(type) pool_bags<tessera::type>,
  static constexpr PoolBags kByType[] = {TESSERA_WEIGHT_TYPES(TESSERA_POOL_BAGS)};
#undef TESSERA_POOL_BAGS
  static_assert(std::size(kByType) == tessera::kWeightTypes, "one for each weight type");
  return kByType[weight_type];
}

void lookup(const LookupJob& job, int64_t bag_begin, int64_t bag_end) {
  if (bag_begin >= bag_end) return;
  int64_t feature = bag_begin / job.batch;
  Prefetcher prefetcher(job, feature, bag_begin, bag_end);
  for (int64_t bag_index = bag_begin; bag_index < bag_end; ++feature) {
    const FeaturePlan& plan = job.plan[feature];
    const int64_t first = feature * job.batch;
    const int64_t last = first + job.batch < bag_end ? first + job.batch : bag_end;
    pool_bags_for(plan.weight_type)(job, plan, feature, bag_index - first, last - first,
                                    &prefetcher);
    bag_index = last;
  }
}

void lookup_rows(const LookupJob& job, int64_t bag_begin, int64_t bag_end) {
  if (bag_begin >= bag_end) return;
  int64_t feature = bag_begin / job.batch;
  Prefetcher prefetcher(job, feature, bag_begin, bag_end);
  for (int64_t bag_index = bag_begin; bag_index < bag_end; ++feature) {
    const FeaturePlan& plan = job.plan[feature];
    const PoolBag pool = pool_bag_for(plan.weight_type);
    Bag bag = feature_bag(job, plan);
    prefetcher.enter(plan);
    const int64_t next = (feature + 1) * job.batch;
    const int64_t last = next < bag_end ? next : bag_end;
    for (int64_t id = job.offsets[bag_index]; id < job.offsets[last]; ++id) {
      take_ids(job, id, id + 1, &bag);
      pool(bag, plan.dim, 1.0f, &prefetcher, job.out_type,
           element(job.out, job.out_type, id * job.out_width));
    }
    bag_index = last;
  }
}

}  // namespace
