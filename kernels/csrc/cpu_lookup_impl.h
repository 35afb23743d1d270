// The lookup kernels, written once over `Vec`; each instruction set includes this file.
//
// A bag is summed in the order of its ids, one register per Vec::kWidth columns: for each id
//   acc[column] = fma(weight * scale, q[column], acc[column]);  bias += weight * row_bias
// and the bag's value is (acc + bias), divided by the number of ids under mean.  So every
// instruction set gives the same bits.
//
// Cold rows are the cost: each takes two cache misses and a page walk.  A Prefetcher runs
// kPrefetchAhead ids in front of the sum, across the ends of bags and features.
#pragma once

#include "cpu_kernels.h"

namespace {

using tessera::FeaturePlan;
using tessera::LookupJob;
using tessera::OutType;

// Ids that are asked for before they are summed.  Enough to keep the core's miss buffers full
// (12 to 24 lines on present machines, two lines a row); more evicts rows that still wait.
constexpr int64_t kPrefetchAhead = 24;
constexpr int64_t kLine = 64;
// Vectors of one register block: 8 accumulators and their addresses fit any instruction set.
constexpr int kBlock = 8;

inline void prefetch_bytes(const uint8_t* begin, int64_t bytes) {
  const uintptr_t first = reinterpret_cast<uintptr_t>(begin) & ~static_cast<uintptr_t>(kLine - 1);
  const uintptr_t last = reinterpret_cast<uintptr_t>(begin) + static_cast<uintptr_t>(bytes);
  for (uintptr_t line = first; line < last; line += kLine) {
    __builtin_prefetch(reinterpret_cast<const void*>(line), 0, 3);
  }
}

// Asks for the rows of ids in order, one step per id summed.
class Prefetcher {
 public:
  Prefetcher(const LookupJob& job, int64_t feature, int64_t first_id, int64_t last_id)
      : job_(job), feature_(feature), next_(first_id), last_(last_id) {
    enter_feature();
    for (int64_t k = 0; k < kPrefetchAhead; ++k) step();
  }

  void step() {
    if (next_ >= last_) return;
    while (next_ >= feature_end_) {
      ++feature_;
      enter_feature();
    }
    const int64_t row = job_.rows[next_++];
    if (row < 0) return;
    prefetch_bytes(data_ + row * row_stride_, row_bytes_);
    if (scale_apart_) prefetch_bytes(scale_ + (row >> scale_shift_) * scale_stride_, 1);
  }

 private:
  void enter_feature() {
    const FeaturePlan& plan = job_.plan[feature_];
    feature_end_ = job_.offsets[(feature_ + 1) * job_.batch];
    row_stride_ = plan.row_stride;
    scale_stride_ = plan.scale_stride;
    scale_shift_ = plan.scale_shift;
    scale_ = job_.weights + plan.scale_offset;
    data_ = job_.weights + plan.data_offset;
    row_bytes_ = tessera::row_data_bytes(plan.weight_type, plan.dim);
    const bool has_scale = plan.scale_type != tessera::kNoScale;
    const bool beside = has_scale && scale_shift_ == 0 && scale_stride_ == row_stride_;
    scale_apart_ = has_scale && !beside;
    if (beside) {  // one run of bytes covers both
      const int64_t gap = plan.scale_offset - plan.data_offset;
      const int64_t scale_end = gap + tessera::scale_bytes(plan.scale_type);
      if (gap < 0) data_ += gap;
      row_bytes_ = (scale_end > row_bytes_ ? scale_end : row_bytes_) - (gap < 0 ? gap : 0);
    }
  }

  const LookupJob& job_;
  int64_t feature_;
  int64_t next_;
  int64_t last_;
  int64_t feature_end_ = 0;
  int64_t row_stride_ = 0;
  int64_t scale_stride_ = 0;
  int64_t scale_shift_ = 0;
  int64_t row_bytes_ = 0;
  const uint8_t* data_ = nullptr;
  const uint8_t* scale_ = nullptr;
  bool scale_apart_ = false;
};

// The part of a feature's plan that summing needs, and one bag of it.
struct Bag {
  const uint8_t* data;
  const uint8_t* scale;
  int64_t row_stride;
  int64_t scale_stride;
  int64_t scale_shift;
  int64_t scale_type;
  const int64_t* rows;
  const float* weights;  // or nullptr
  int64_t size;
};

inline Bag feature_bag(const LookupJob& job, const FeaturePlan& plan) {
  return {job.weights + plan.data_offset, job.weights + plan.scale_offset, plan.row_stride,
          plan.scale_stride, plan.scale_shift, plan.scale_type, nullptr, nullptr, 0};
}

inline void take_ids(const LookupJob& job, int64_t begin, int64_t end, Bag* bag) {
  bag->rows = job.rows + begin;
  bag->weights = job.id_weights == nullptr ? nullptr : job.id_weights + begin;
  bag->size = end - begin;
}

template <int64_t T>
inline Vec load_weights(const uint8_t* row, int64_t column) {
  if constexpr (T == tessera::kFloat32) {
    float values[Vec::kWidth];
    std::memcpy(values, row + 4 * column, sizeof(values));
    return Vec::load(values);
  } else if constexpr (T == tessera::kFloat16) {
    return Vec::load_half(row + 2 * column);
  } else if constexpr (T == tessera::kBFloat16) {
    return Vec::load_bfloat(row + 2 * column);
  } else if constexpr (T == tessera::kFloat8) {
    return Vec::load_float8(row + column);
  } else if constexpr (T == tessera::kInt8) {
    return Vec::load_int8(row + column);
  } else {
    if constexpr (Vec::kWidth == 1) {
      const uint8_t half = static_cast<uint8_t>(row[column / 2] >> (4 * (column & 1)));
      return Vec::load_int4(&half);
    }
    return Vec::load_int4(row + column / 2);
  }
}

// The first `count` (< Vec::kWidth) columns from `column` on; nothing past them is read.
template <int64_t T>
inline Vec load_some_weights(const uint8_t* row, int64_t column, int64_t count) {
  uint8_t copy[4 * Vec::kWidth] = {};
  std::memcpy(copy, row + tessera::row_data_bytes(T, column),
              static_cast<size_t>(tessera::row_data_bytes(T, count)));
  return load_weights<T>(copy, 0);
}

inline void load_scale(const Bag& bag, int64_t row, float* scale, float* bias) {
  const uint8_t* at = bag.scale + (row >> bag.scale_shift) * bag.scale_stride;
  if (bag.scale_type == tessera::kHalfScale) {
    load_half_pair(at, scale, bias);
  } else {
    std::memcpy(scale, at, 4);
    std::memcpy(bias, at + 4, 4);
  }
}

// Sums N vectors of columns (or, with `count` > 0, one vector's first `count` columns).
template <int64_t T, int N>
inline float sum_columns(const Bag& bag, int64_t column, int64_t count, Prefetcher* prefetcher,
                         Vec (&acc)[N]) {
  float bias_sum = 0.0f;
  for (int k = 0; k < N; ++k) acc[k] = Vec::zero();
  for (int64_t i = 0; i < bag.size; ++i) {
    if (prefetcher != nullptr) prefetcher->step();
    const int64_t row = bag.rows[i];
    if (row < 0) continue;
    float factor = bag.weights == nullptr ? 1.0f : bag.weights[i];
    if (bag.scale_type != tessera::kNoScale) {
      float scale;
      float bias;
      load_scale(bag, row, &scale, &bias);
      bias_sum += factor * bias;
      factor *= scale;
    }
    const Vec scales = Vec::set(factor);
    const uint8_t* data = bag.data + row * bag.row_stride;
    if (count > 0) {
      acc[0] = fma(scales, load_some_weights<T>(data, column, count), acc[0]);
    } else {
      for (int k = 0; k < N; ++k) {
        acc[k] = fma(scales, load_weights<T>(data, column + k * Vec::kWidth), acc[k]);
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
  const bool quantized = bag.scale_type != tessera::kNoScale;
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
  static constexpr PoolBag kByType[tessera::kWeightTypes] = {
      pool_bag<tessera::kFloat32>, pool_bag<tessera::kFloat16>, pool_bag<tessera::kBFloat16>,
      pool_bag<tessera::kFloat8>,  pool_bag<tessera::kInt8>,    pool_bag<tessera::kInt4>};
  return kByType[weight_type];
}

inline float bag_divisor(const FeaturePlan& plan, int64_t size) {
  return plan.pooling == tessera::kMean && size > 1 ? static_cast<float>(size) : 1.0f;
}

inline void* element(void* base, OutType type, int64_t index) {
  return static_cast<uint8_t*>(base) + index * (type == OutType::kFloat32 ? 4 : 2);
}

void lookup(const LookupJob& job, int64_t bag_begin, int64_t bag_end) {
  if (bag_begin >= bag_end) return;
  int64_t feature = bag_begin / job.batch;
  Prefetcher prefetcher(job, feature, job.offsets[bag_begin], job.offsets[bag_end]);
  for (int64_t bag_index = bag_begin; bag_index < bag_end; ++feature) {
    const FeaturePlan& plan = job.plan[feature];
    const PoolBag pool = pool_bag_for(plan.weight_type);
    Bag bag = feature_bag(job, plan);
    const int64_t first = feature * job.batch;
    const int64_t last = first + job.batch < bag_end ? first + job.batch : bag_end;
    for (; bag_index < last; ++bag_index) {
      take_ids(job, job.offsets[bag_index], job.offsets[bag_index + 1], &bag);
      const int64_t at = (bag_index - first) * job.out_width + plan.out_column;
      pool(bag, plan.dim, bag_divisor(plan, bag.size), &prefetcher, job.out_type,
           element(job.out, job.out_type, at));
    }
  }
}

void lookup_rows(const LookupJob& job, int64_t bag_begin, int64_t bag_end) {
  if (bag_begin >= bag_end) return;
  int64_t feature = bag_begin / job.batch;
  Prefetcher prefetcher(job, feature, job.offsets[bag_begin], job.offsets[bag_end]);
  for (int64_t bag_index = bag_begin; bag_index < bag_end; ++feature) {
    const FeaturePlan& plan = job.plan[feature];
    const PoolBag pool = pool_bag_for(plan.weight_type);
    Bag bag = feature_bag(job, plan);
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
