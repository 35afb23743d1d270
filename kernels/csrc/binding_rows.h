// The rows of a commit's patches as operators are given them, checked. See row_exchange.h.
#pragma once

#include <ATen/ATen.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "pauses.h"
#include "row_exchange.h"
#include "row_restore.h"

namespace tessera {

using at::Tensor;

// Rows or pages that are touched before a pause: they take some 100 to 500 microseconds.
constexpr std::size_t kTouchedAtOnce = 1024;

template <typename Row>
void check_rows(const Row* rows, int64_t count, int64_t limit) {
  int64_t before = -1;
  for (int64_t i = 0; i < count; ++i) {
    TORCH_CHECK(rows[i] > before && rows[i] < limit, "rows: entry ", i, " is ", rows[i],
                ", expected more than ", before, " and less than ", limit);
    before = rows[i];
  }
}

// Where the rows of a table lie; throws where one does not lie in its storage. It holds no share of
// the tensors.
class Rows {
 public:
  Rows(const Tensor& storage, const Tensor& rows, int64_t width, int64_t offset, int64_t stride)
      : width_(width), stride_(stride), count_(rows.numel()) {
    TORCH_CHECK(storage.scalar_type() == at::kByte && storage.dim() == 1 && storage.is_contiguous(),
                "storage: a contiguous uint8 vector is needed, got ", storage.scalar_type(), " ",
                storage.sizes());
    TORCH_CHECK((rows.scalar_type() == at::kLong || rows.scalar_type() == at::kInt) &&
                    rows.dim() == 1 && rows.is_contiguous(),
                "rows: a contiguous int64 or int32 vector is needed, got ", rows.scalar_type(), " ",
                rows.sizes());
    TORCH_CHECK(width >= 1 && stride >= width, "stride: ", stride, ", expected the width ", width,
                " or more, of at least 1");
    TORCH_CHECK(offset >= 0 && offset <= storage.numel(), "offset: ", offset, ", expected 0 to ",
                storage.numel());
    const int64_t room = storage.numel() - offset;
    const int64_t limit = room < width ? 0 : (room - width) / stride + 1;
    if (rows.scalar_type() == at::kInt) {
      rows32_ = rows.const_data_ptr<int32_t>();
      check_rows(rows32_, count_, limit);
    } else {
      rows64_ = rows.const_data_ptr<int64_t>();
      check_rows(rows64_, count_, limit);
    }
    begin_ = static_cast<std::byte*>(storage.mutable_data_ptr()) + offset;
  }

  // Changes places with `values`, `width` bytes of each row.
  void exchange(std::byte* values) const {
    each([&](auto row_at) {
      exchange_rows_at(static_cast<std::size_t>(count_), static_cast<std::size_t>(width_), row_at,
                       values);
    });
  }

  // The same rows with what they are to have again; there is at least one.
  OldRows old(const std::byte* values) const {
    const bool narrow = rows32_ != nullptr;
    return {.begin = begin_,
            .stride = stride(),
            .width = width(),
            .count = count(),
            .values = values,
            .numbers = narrow ? static_cast<const void*>(rows32_) : rows64_,
            .number_bytes = narrow ? sizeof *rows32_ : sizeof *rows64_};
  }

  std::byte* begin() const { return begin_; }
  std::size_t width() const { return static_cast<std::size_t>(width_); }
  std::size_t stride() const { return static_cast<std::size_t>(stride_); }
  std::size_t count() const { return static_cast<std::size_t>(count_); }
  int64_t number(std::size_t i) const { return rows32_ != nullptr ? rows32_[i] : rows64_[i]; }

  void touch() const { touch(0, static_cast<std::size_t>(count_)); }

  void touch(Pauses& pauses) const {
    const auto count = static_cast<std::size_t>(count_);
    for (std::size_t first = 0; first < count; first += kTouchedAtOnce) {
      touch(first, std::min(kTouchedAtOnce, count - first));
      pauses.rest();
    }
  }

 private:
  void touch(std::size_t first, std::size_t count) const {
    each([&](auto row_at) {
      touch_rows_at(count, static_cast<std::size_t>(width_),
                    [&](std::size_t i) { return row_at(first + i); });
    });
  }

  // Calls `work` with where row i begins.
  template <typename Work>
  void each(Work work) const {
    const auto at = [begin = begin_, stride = stride_](auto rows) {
      return [begin, stride, rows](std::size_t i) { return begin + rows[i] * stride; };
    };
    if (rows32_ != nullptr) {
      work(at(rows32_));
    } else {
      work(at(rows64_));
    }
  }

  int64_t width_;
  int64_t stride_;
  int64_t count_;
  const int32_t* rows32_ = nullptr;  // one of the two
  const int64_t* rows64_ = nullptr;
  std::byte* begin_;
};

// The bytes of a row of `values`, which must have one for each of `rows`.
inline int64_t width_of(const Tensor& values, const Tensor& rows) {
  TORCH_CHECK(values.scalar_type() == at::kByte && values.dim() == 2 && values.is_contiguous() &&
                  values.size(0) == rows.numel(),
              "values: contiguous uint8 [", rows.numel(), ", width] is needed, got ",
              values.scalar_type(), " ", values.sizes());
  return values.size(1);
}

// The rows of each patch, all checked before any byte changes.
inline std::vector<Rows> checked(at::TensorList storages, at::TensorList rows,
                                 at::TensorList values, at::IntArrayRef offsets,
                                 at::IntArrayRef strides) {
  const std::size_t count = storages.size();
  TORCH_CHECK(rows.size() == count && values.size() == count && offsets.size() == count &&
                  strides.size() == count,
              "the lists have different lengths: ", count, " storages, ", rows.size(), " rows, ",
              values.size(), " values, ", offsets.size(), " offsets, ", strides.size(), " strides");
  std::vector<Rows> all;
  all.reserve(count);
  for (std::size_t i = 0; i < count; ++i) {
    all.emplace_back(storages[i], rows[i], width_of(values[i], rows[i]), offsets[i], strides[i]);
  }
  return all;
}

}  // namespace tessera
