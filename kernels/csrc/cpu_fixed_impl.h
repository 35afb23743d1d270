// Bags of features whose rows are a few whole vectors, written once over `Vec`.
#pragma once

#include "cpu_bag_impl.h"
#include "cpu_prefetch.h"

namespace {

// Whether pool_fixed_bags serves a feature: the scale that its type has with FBGEMM and with
// quantize.py, in fp16, and float32 out.
template <int64_t T>
inline bool fixed_serves(const LookupJob& job, const FeaturePlan& plan) {
  constexpr bool kScaled = tessera::scale_rule(T) == tessera::kHalfScale;
  return job.out_type == OutType::kFloat32 &&
         (T == tessera::kBlockInt8 ||
          plan.scale_type == (kScaled ? tessera::kHalfScale : tessera::kNoScale));
}

// The common case, with nothing decided per bag: rows of exactly N vectors, float32 out.  How few
// instructions stand between two rows' prefetches decides the speed of cold rows as well.
template <int64_t T, int N, bool Apart, bool Weighted>
void pool_fixed_bags(const LookupJob& job, const FeaturePlan& plan, int64_t feature, int64_t begin,
                     int64_t end, Prefetcher* prefetcher) {
  constexpr bool kScaled = tessera::scale_rule(T) == tessera::kHalfScale;
  constexpr int64_t kRowBytes = tessera::row_data_bytes(T, N * Vec::kWidth);
  const Bag table = feature_bag(job, plan);
  const uint8_t* const weights = job.weights;
  const int64_t scale_gap = plan.scale_offset - plan.data_offset;
  const bool mean = plan.pooling == tessera::kMean;
  const int64_t* const offsets = job.offsets + feature * job.batch;
  const int64_t* const starts = job.starts;
  const Book book = T == tessera::kBlockInt8 ? load_book(table.scale) : Book{};
  const Prefetcher ahead = *prefetcher;
  for (int64_t b = begin; b < end; ++b) {
    Vec acc[N];
    for (int k = 0; k < N; ++k) acc[k] = Vec::zero();
    float bias_sum = 0.0f;
    const int64_t first = offsets[b];
    const int64_t last = offsets[b + 1];
    for (int64_t i = first; i < last; ++i) {
      ahead.ask<kRowBytes, Apart>(i);
      const int64_t start = starts[i];
      if (start == tessera::kSkipped) continue;
      const uint8_t* const data = weights + start;
      float factor = Weighted ? job.id_weights[i] : 1.0f;
      if constexpr (kScaled) {
        float scale;
        float bias;
        load_half_pair(Apart ? table.scale + (job.rows[i] >> table.scale_shift) * table.scale_stride
                             : data + scale_gap,
                       &scale, &bias);
        bias_sum += Weighted ? factor * bias : bias;
        factor = Weighted ? factor * scale : scale;
      }
      Vec scales[N];
      row_scales<T>(book, data, factor, scales);
      for (int k = 0; k < N; ++k) {
        acc[k] = fma(scales[k], load_weights<T>(data, k * Vec::kWidth), acc[k]);
      }
    }
    float* out = static_cast<float*>(job.out) + b * job.out_width + plan.out_column;
    const Vec bias = Vec::set(bias_sum);
    for (int k = 0; k < N; ++k) {
      if (kScaled) acc[k] = add(acc[k], bias);
      if (mean && last - first > 1) {
        acc[k] = divide(acc[k], Vec::set(static_cast<float>(last - first)));
      }
      acc[k].store(out + k * Vec::kWidth);
    }
  }
  prefetcher->passed(offsets[end]);
}

// The same for bags of one id each, without weights: ids [first, last), the first one's vector
// going to `out`.
template <int64_t T, int N, bool Apart>
void pool_single_ids(const LookupJob& job, const FeaturePlan& plan, int64_t first, int64_t last,
                     float* out, Prefetcher* prefetcher) {
  constexpr bool kScaled = tessera::scale_rule(T) == tessera::kHalfScale;
  constexpr int64_t kRowBytes = tessera::row_data_bytes(T, N * Vec::kWidth);
  const Bag table = feature_bag(job, plan);
  const uint8_t* const weights = job.weights;
  const int64_t scale_gap = plan.scale_offset - plan.data_offset;
  const int64_t* const starts = job.starts;
  const int64_t out_width = job.out_width;
  const Book book = T == tessera::kBlockInt8 ? load_book(table.scale) : Book{};
  const Prefetcher ahead = *prefetcher;
  for (int64_t i = first; i < last; ++i, out += out_width) {
    ahead.ask<kRowBytes, Apart>(i);
    const int64_t start = starts[i];
    if (start == tessera::kSkipped) {
      for (int k = 0; k < N; ++k) Vec::zero().store(out + k * Vec::kWidth);
      continue;
    }
    const uint8_t* const data = weights + start;
    float scale = 1.0f;
    float bias = 0.0f;
    if constexpr (kScaled) {
      load_half_pair(Apart ? table.scale + (job.rows[i] >> table.scale_shift) * table.scale_stride
                           : data + scale_gap,
                     &scale, &bias);
    }
    Vec scales[N];
    row_scales<T>(book, data, scale, scales);
    const Vec biases = Vec::set(0.0f + bias);  // as the sum of one: never -0
    for (int k = 0; k < N; ++k) {
      Vec value = fma(scales[k], load_weights<T>(data, k * Vec::kWidth), Vec::zero());
      if (kScaled) value = add(value, biases);
      value.store(out + k * Vec::kWidth);
    }
  }
  prefetcher->passed(last);
}

inline bool all_single(const int64_t* offsets, int64_t begin, int64_t end) {
  bool single = offsets[end] - offsets[begin] == end - begin;
  for (int64_t b = begin; single && b < end; ++b) single = offsets[b + 1] - offsets[b] == 1;
  return single;
}

template <int64_t T, int N>
void pool_fixed_feature(const LookupJob& job, const FeaturePlan& plan, int64_t feature,
                        int64_t begin, int64_t end, Prefetcher* prefetcher) {
  const int64_t* const offsets = job.offsets + feature * job.batch;
  const auto pool = [&]<bool Apart>() {
    if (job.id_weights != nullptr) {
      pool_fixed_bags<T, N, Apart, true>(job, plan, feature, begin, end, prefetcher);
    } else if (all_single(offsets, begin, end)) {
      float* const out = static_cast<float*>(job.out) + begin * job.out_width + plan.out_column;
      pool_single_ids<T, N, Apart>(job, plan, offsets[begin], offsets[end], out, prefetcher);
    } else {
      pool_fixed_bags<T, N, Apart, false>(job, plan, feature, begin, end, prefetcher);
    }
  };
  prefetcher->scales_apart() ? pool.template operator()<true>() : pool.template operator()<false>();
}

}  // namespace
