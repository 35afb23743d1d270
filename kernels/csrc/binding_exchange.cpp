// What a server does with a commit's rows, on the CPU: they change places with those of a table, so
// what was in the table lies in `values` afterwards. The call that applies a commit makes its undo
// record, and the same call with that record undoes it. See row_exchange.h.
#include <ATen/ATen.h>
#include <torch/library.h>

#include <cstdint>

#include "row_exchange.h"

namespace tessera {
namespace {

using at::Tensor;

void check_rows(const int64_t* rows, int64_t count, int64_t limit) {
  int64_t before = -1;
  for (int64_t i = 0; i < count; ++i) {
    TORCH_CHECK(rows[i] > before && rows[i] < limit, "rows: entry ", i, " is ", rows[i],
                ", expected more than ", before, " and less than ", limit);
    before = rows[i];
  }
}

// Where the rows of a table lie; throws where one does not lie in its storage.
class Rows {
 public:
  Rows(const Tensor& storage, const Tensor& rows, int64_t width, int64_t offset, int64_t stride)
      : stride_(stride) {
    TORCH_CHECK(storage.scalar_type() == at::kByte && storage.dim() == 1 && storage.is_contiguous(),
                "storage: a contiguous uint8 vector is needed, got ", storage.scalar_type(), " ",
                storage.sizes());
    TORCH_CHECK(rows.scalar_type() == at::kLong && rows.dim() == 1 && rows.is_contiguous(),
                "rows: a contiguous int64 vector is needed, got ", rows.scalar_type(), " ",
                rows.sizes());
    TORCH_CHECK(width >= 1 && stride >= width, "stride: ", stride, ", expected the width ", width,
                " or more, of at least 1");
    TORCH_CHECK(offset >= 0 && offset <= storage.numel(), "offset: ", offset, ", expected 0 to ",
                storage.numel());
    const int64_t room = storage.numel() - offset;
    rows_ = rows.const_data_ptr<int64_t>();
    check_rows(rows_, rows.numel(), room < width ? 0 : (room - width) / stride + 1);
    begin_ = static_cast<std::byte*>(storage.mutable_data_ptr()) + offset;
  }

  std::byte* operator()(std::size_t i) const { return begin_ + rows_[i] * stride_; }

 private:
  int64_t stride_;
  const int64_t* rows_;
  std::byte* begin_;
};

void exchange_rows(const Tensor& storage, const Tensor& rows, const Tensor& values, int64_t offset,
                   int64_t stride) {
  TORCH_CHECK(values.scalar_type() == at::kByte && values.dim() == 2 && values.is_contiguous() &&
                  values.size(0) == rows.numel(),
              "values: contiguous uint8 [", rows.numel(), ", width] is needed, got ",
              values.scalar_type(), " ", values.sizes());
  const int64_t width = values.size(1);
  const Rows row_at(storage, rows, width, offset, stride);
  exchange_rows_at(static_cast<std::size_t>(rows.numel()), static_cast<std::size_t>(width), row_at,
                   static_cast<std::byte*>(values.mutable_data_ptr()));
}

void touch_rows(const Tensor& storage, const Tensor& rows, int64_t width, int64_t offset,
                int64_t stride) {
  const Rows row_at(storage, rows, width, offset, stride);
  touch_rows_at(static_cast<std::size_t>(rows.numel()), static_cast<std::size_t>(width), row_at);
}

}  // namespace
}  // namespace tessera

TORCH_LIBRARY_IMPL(tessera, CPU, m) {
  m.impl("exchange_rows", tessera::exchange_rows);
  m.impl("touch_rows", tessera::touch_rows);
}
