// What a server does with a commit's rows, on the CPU: they change places with those of a table, so
// what was in the table lies in `values` afterwards. The call that applies a commit makes its undo
// record, and the same call with that record undoes it. See row_exchange.h.
//
// `exchange_rows_of` does all patches of a commit in one call: a server's Python calls it while no
// batch is computed, and each call of an operator gives the interpreter's lock away and waits for
// it again. `touch_rows_aside` does what a server does beside answering, in pieces with pauses, in
// one call for the same reason: a thread that stands back for others and takes that lock a hundred
// times may be without a CPU while it has it, and then all others wait for it.
#include <ATen/ATen.h>
#include <torch/library.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "pauses.h"
#include "row_exchange.h"

namespace tessera {
namespace {

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
int64_t width_of(const Tensor& values, const Tensor& rows) {
  TORCH_CHECK(values.scalar_type() == at::kByte && values.dim() == 2 && values.is_contiguous() &&
                  values.size(0) == rows.numel(),
              "values: contiguous uint8 [", rows.numel(), ", width] is needed, got ",
              values.scalar_type(), " ", values.sizes());
  return values.size(1);
}

void exchange_rows(const Tensor& storage, const Tensor& rows, const Tensor& values, int64_t offset,
                   int64_t stride) {
  Rows(storage, rows, width_of(values, rows), offset, stride)
      .exchange(static_cast<std::byte*>(values.mutable_data_ptr()));
}

// Of each patch its rows, all checked before any byte changes.
std::vector<Rows> checked(at::TensorList storages, at::TensorList rows, at::TensorList values,
                          at::IntArrayRef offsets, at::IntArrayRef strides) {
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

void exchange_rows_of(at::TensorList storages, at::TensorList rows, at::TensorList values,
                      at::IntArrayRef offsets, at::IntArrayRef strides) {
  const std::vector<Rows> all = checked(storages, rows, values, offsets, strides);
  for (std::size_t i = 0; i < all.size(); ++i) {
    all[i].exchange(static_cast<std::byte*>(values[i].mutable_data_ptr()));
  }
}

void touch_rows_of(at::TensorList storages, at::TensorList rows, at::TensorList values,
                   at::IntArrayRef offsets, at::IntArrayRef strides) {
  for (const Rows& one : checked(storages, rows, values, offsets, strides)) one.touch();
}

// Has each page of `values` written to and changes no byte: memory that another process has filled
// has no pages in this one yet.
void touch_pages(const Tensor& values, Pauses& pauses) {
  auto* const begin = static_cast<std::byte*>(values.mutable_data_ptr());
  const auto pages = (static_cast<std::size_t>(values.numel()) + kRowPage - 1) / kRowPage;
  for (std::size_t first = 0; first < pages; first += kTouchedAtOnce) {
    touch_rows_at(std::min(kTouchedAtOnce, pages - first), 1,
                  [&](std::size_t i) { return begin + (first + i) * kRowPage; });
    pauses.rest();
  }
}

void touch_rows_aside(at::TensorList storages, at::TensorList rows, at::TensorList values,
                      at::IntArrayRef offsets, at::IntArrayRef strides, double share,
                      double seconds) {
  TORCH_CHECK(share > 0 && share <= 1, "share: ", share, ", expected more than 0 and at most 1");
  const std::vector<Rows> all = checked(storages, rows, values, offsets, strides);
  Pauses pauses(share, seconds);
  for (std::size_t i = 0; i < all.size(); ++i) {
    all[i].touch(pauses);
    touch_pages(values[i], pauses);
  }
}

}  // namespace
}  // namespace tessera

TORCH_LIBRARY_IMPL(tessera, CPU, m) {
  m.impl("exchange_rows", tessera::exchange_rows);
  m.impl("exchange_rows_of", tessera::exchange_rows_of);
  m.impl("touch_rows_of", tessera::touch_rows_of);
  m.impl("touch_rows_aside", tessera::touch_rows_aside);
}
