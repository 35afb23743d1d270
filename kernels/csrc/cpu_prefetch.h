// Asks for rows before they are summed.
//
// A cold row costs a page walk and one miss per line, and a core keeps only so many misses open (12
// to 24 on present machines), so all that counts is that they stay open all the time: rows are
// asked for in the order of their ids, a fixed number of ids ahead, across the ends of bags and
// features.
#pragma once

#include "cpu_kernels.h"

namespace {

using tessera::FeaturePlan;
using tessera::LookupJob;

constexpr int64_t kLine = 64;

// Into which cache rows are asked for; a file that includes this may choose the second.
#if !defined(TESSERA_PREFETCH_CACHE)
#define TESSERA_PREFETCH_CACHE 1
#endif

inline void prefetch_line(const uint8_t* at) {
  __builtin_prefetch(at, 0, 4 - TESSERA_PREFETCH_CACHE);
}

class Prefetcher {
 public:
  // For the ids of bags [bag_begin, bag_end), of which there is at least one bag.  Asks for the
  // first of them.
  Prefetcher(const LookupJob& job, int64_t feature, int64_t bag_begin, int64_t bag_end)
      : weights_(job.weights),
        starts_(job.starts),
        rows_(job.rows),
        next_(job.offsets[bag_begin]),
        last_(job.offsets[bag_end] - 1) {
    int64_t widest = kLine;
    for (int64_t f = feature; f * job.batch < bag_end; ++f) {
      const int64_t bytes = tessera::row_data_bytes(job.plan[f].weight_type, job.plan[f].dim);
      widest = bytes > widest ? bytes : widest;
    }
    ahead_ = kBytesAhead / (widest + kLine);
    ahead_ = ahead_ < kLeastAhead ? kLeastAhead : ahead_ > kMostAhead ? kMostAhead : ahead_;
    enter(job.plan[feature]);
    const int64_t count = last_ + 1 - next_ < ahead_ ? last_ + 1 - next_ : ahead_;
    for (int64_t k = 0; k < count; ++k) ask<0, true>(next_ + k - ahead_);
  }

  // The ids asked for from now on are taken for rows of `plan`: those of the next feature that are
  // asked for early may lack a line where that feature's rows are wider.
  void enter(const FeaturePlan& plan) {
    first_byte_ = 0;
    last_byte_ = tessera::row_data_bytes(plan.weight_type, plan.dim) - 1;
    apart_ = false;
    if (!tessera::has_bias(plan.scale_type)) return;
    apart_ = plan.scale_shift != 0 || plan.scale_stride != plan.row_stride;
    if (apart_) {
      scales_ = weights_ + plan.scale_offset;
      scale_stride_ = plan.scale_stride;
      scale_shift_ = plan.scale_shift;
      return;
    }
    const int64_t gap = plan.scale_offset - plan.data_offset;
    const int64_t scale_last = gap + tessera::scale_bytes(plan.scale_type) - 1;
    if (gap < 0) first_byte_ = gap;
    if (scale_last > last_byte_) last_byte_ = scale_last;
  }

  // Whether the feature's scales lie in an array of their own.
  bool scales_apart() const { return apart_; }

  // Asks for the row that is summed `ahead_` ids after id i.  Rows hold at least RowBytes bytes
  // (0: not known); Apart: look whether the scales lie apart.
  template <int64_t RowBytes, bool Apart>
  __attribute__((always_inline)) void ask(int64_t i) const {
    const int64_t id = i + ahead_ < last_ ? i + ahead_ : last_;
    // An id that is skipped starts where no memory is: asking for that is harmless.
    const uint8_t* const data = weights_ + starts_[id];
    prefetch_line(data + first_byte_);
    if constexpr (RowBytes != 0) {
      for (int64_t byte = kLine; byte < RowBytes; byte += kLine) {
        prefetch_line(data + first_byte_ + byte);
      }
    } else {
      for (int64_t byte = first_byte_ + kLine; byte < last_byte_; byte += kLine) {
        prefetch_line(data + byte);
      }
    }
    prefetch_line(data + last_byte_);
    if (Apart && apart_) {
      const int64_t row = rows_[id] < 0 ? 0 : rows_[id];
      prefetch_line(scales_ + (row >> scale_shift_) * scale_stride_);
    }
  }

  // One id further, whatever its kind.
  void step() { ask<0, true>(next_++); }

  // Ids before `id` were summed without step().
  void passed(int64_t id) { next_ = id; }

 private:
  static constexpr int64_t kMostAhead = 64;
  static constexpr int64_t kLeastAhead = 4;
  static constexpr int64_t kBytesAhead = 8192;  // a part of the first cache

  const uint8_t* weights_;
  const int64_t* starts_;
  const int64_t* rows_;
  int64_t next_;
  int64_t last_;
  int64_t ahead_ = 0;
  int64_t first_byte_ = 0;
  int64_t last_byte_ = 0;
  const uint8_t* scales_ = nullptr;
  int64_t scale_stride_ = 0;
  int64_t scale_shift_ = 0;
  bool apart_ = false;
};

}  // namespace
