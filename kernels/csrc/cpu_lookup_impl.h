// The lookup kernels, written once over `Vec`; each instruction set includes this file.
//
// A bag is summed in the order of its ids, one register per Vec::kWidth columns: for each id
//   acc[column] = fma(weight * scale, q[column], acc[column]);  bias += weight * row_bias
// and the bag's value is (acc + bias), divided by the number of ids under mean.  So every
// instruction set gives the same bits.
//
// Cold rows are the cost: each takes cache misses and a page walk.  A Prefetcher runs in front of
// the sum, across the ends of bags and features.
#pragma once

#include "cpu_kernels.h"

namespace {

using tessera::FeaturePlan;
using tessera::LookupJob;
using tessera::OutType;

// Ids that are asked for before they are summed: enough to keep the core's miss buffers full (12 to
// 24 lines on present machines, two lines a row).
constexpr int64_t kPrefetchAhead = 32;
constexpr int64_t kLine = 64;
// Vectors of one register block: 8 accumulators and their addresses fit any instruction set.
constexpr int kBlock = 8;

inline void prefetch_line(const uint8_t* at) { __builtin_prefetch(at, 0, 3); }

// Asks for the rows of ids in order, across the ends of features, one step per id summed.
class Prefetcher {
 public:
  Prefetcher(const LookupJob& job, int64_t feature, int64_t first_id, int64_t last_id)
      : rows_(job.rows), next_(first_id), last_(last_id), feature_(feature - 1), job_(job) {
    for (int64_t k = 0; k < kPrefetchAhead; ++k) step();
  }

  __attribute__((always_inline)) void step() {
    if (next_ >= feature_end_ && !enter_feature()) return;
    const int64_t row = rows_[next_++];
    const uint8_t* at = begin_ + (row < 0 ? 0 : row) * row_stride_;
    prefetch_line(at);
    prefetch_line(at + last_byte_);
    if (more_) prefetch_more(at, row < 0 ? 0 : row);
  }

 private:
  // The next feature that has ids to ask for; false: there is none.
  bool enter_feature() {
    while (next_ >= feature_end_) {
      if (next_ >= last_) return false;
      const FeaturePlan& plan = job_.plan[++feature_];
      feature_end_ = job_.offsets[(feature_ + 1) * job_.batch];
      if (feature_end_ > last_) feature_end_ = last_;
      row_stride_ = plan.row_stride;
      begin_ = job_.weights + plan.data_offset;
      last_byte_ = tessera::row_data_bytes(plan.weight_type, plan.dim) - 1;
      apart_ = nullptr;
      if (plan.scale_type != tessera::kNoScale) {
        if (plan.scale_shift != 0 || plan.scale_stride != plan.row_stride) {
          apart_ = &plan;
        } else {  // one run of bytes covers both
          const int64_t gap = plan.scale_offset - plan.data_offset;
          const int64_t scale_last = gap + tessera::scale_bytes(plan.scale_type) - 1;
          if (scale_last > last_byte_) last_byte_ = scale_last;
          if (gap < 0) {
            begin_ += gap;
            last_byte_ -= gap;
          }
        }
      }
      more_ = apart_ != nullptr || last_byte_ >= 2 * kLine;
    }
    return true;
  }

  // Lines between the first and the last, and a scale that lies elsewhere.
  __attribute__((noinline)) void prefetch_more(const uint8_t* at, int64_t row) const {
    for (int64_t byte = kLine; byte < last_byte_; byte += kLine) prefetch_line(at + byte);
    if (apart_ != nullptr) {
      const int64_t scale = row >> apart_->scale_shift;
      prefetch_line(job_.weights + apart_->scale_offset + scale * apart_->scale_stride);
    }
  }

  const int64_t* rows_;
  int64_t next_;
  int64_t last_;
  int64_t feature_;
  const LookupJob& job_;
  int64_t feature_end_ = INT64_MIN;
  int64_t row_stride_ = 0;
  int64_t last_byte_ = 0;
  const uint8_t* begin_ = nullptr;
  const FeaturePlan* apart_ = nullptr;
  bool more_ = false;
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

// The common case, with nothing decided per bag: rows of exactly N vectors, float32 out.
template <int64_t T, int N>
void pool_fixed_bags(const LookupJob& job, const FeaturePlan& plan, int64_t feature, int64_t begin,
                     int64_t end, Prefetcher* prefetcher) {
  const Bag table = feature_bag(job, plan);
  const bool scaled = plan.scale_type != tessera::kNoScale;
  const int64_t* const offsets = job.offsets + feature * job.batch;
  for (int64_t b = begin; b < end; ++b) {
    Vec acc[N];
    for (int k = 0; k < N; ++k) acc[k] = Vec::zero();
    float bias_sum = 0.0f;
    const int64_t last = offsets[b + 1];
    for (int64_t i = offsets[b]; i < last; ++i) {
      prefetcher->step();
      const int64_t row = job.rows[i];
      if (row < 0) continue;
      float factor = job.id_weights == nullptr ? 1.0f : job.id_weights[i];
      if (scaled) {
        float scale;
        float bias;
        load_scale(table, row, &scale, &bias);
        bias_sum += factor * bias;
        factor *= scale;
      }
      const Vec scales = Vec::set(factor);
      const uint8_t* data = table.data + row * table.row_stride;
      for (int k = 0; k < N; ++k) {
        acc[k] = fma(scales, load_weights<T>(data, k * Vec::kWidth), acc[k]);
      }
    }
    float* out = static_cast<float*>(job.out) + b * job.out_width + plan.out_column;
    const Vec bias = Vec::set(bias_sum);
    const float divisor = bag_divisor(plan, last - offsets[b]);
    for (int k = 0; k < N; ++k) {
      if (scaled) acc[k] = add(acc[k], bias);
      if (divisor != 1.0f) acc[k] = divide(acc[k], Vec::set(divisor));
      acc[k].store(out + k * Vec::kWidth);
    }
  }
}

// Bags [begin, end) of one feature.
template <int64_t T>
void pool_bags(const LookupJob& job, const FeaturePlan& plan, int64_t feature, int64_t begin,
               int64_t end, Prefetcher* prefetcher) {
  if (job.out_type == OutType::kFloat32) {
    switch (plan.dim) {
      case 2 * Vec::kWidth:
        return pool_fixed_bags<T, 2>(job, plan, feature, begin, end, prefetcher);
      case 4 * Vec::kWidth:
        return pool_fixed_bags<T, 4>(job, plan, feature, begin, end, prefetcher);
      case 8 * Vec::kWidth:
        return pool_fixed_bags<T, 8>(job, plan, feature, begin, end, prefetcher);
      default:
        break;
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
  static constexpr PoolBags kByType[tessera::kWeightTypes] = {
      pool_bags<tessera::kFloat32>, pool_bags<tessera::kFloat16>, pool_bags<tessera::kBFloat16>,
      pool_bags<tessera::kFloat8>,  pool_bags<tessera::kInt8>,    pool_bags<tessera::kInt4>};
  return kByType[weight_type];
}

void lookup(const LookupJob& job, int64_t bag_begin, int64_t bag_end) {
  if (bag_begin >= bag_end) return;
  int64_t feature = bag_begin / job.batch;
  Prefetcher prefetcher(job, feature, job.offsets[bag_begin], job.offsets[bag_end]);
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
