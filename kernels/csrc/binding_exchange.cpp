// What a server does with a commit's rows, on the CPU: they change places with those of a table, so
// what was in the table lies in `values` afterwards. The call that applies a commit makes its undo
// record, and the same call with that record undoes it. See row_exchange.h.
//
// `exchange_rows_of` does all patches of a commit in one call: a server's Python calls it while no
// batch is computed, and each call of an operator gives the interpreter's lock away and waits for
// it again. `touch_rows_aside` does what a server does beside answering, in pieces with pauses, in
// one call for the same reason: a thread that stands back for others and takes that lock a hundred
// times may be without a CPU while it has it, and then all others wait for it. `restore_rows` takes
// several commits back at once (row_restore.h).
#include <torch/library.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "binding_rows.h"

namespace tessera {
namespace {

void exchange_rows(const Tensor& storage, const Tensor& rows, const Tensor& values, int64_t offset,
                   int64_t stride) {
  Rows(storage, rows, width_of(values, rows), offset, stride)
      .exchange(static_cast<std::byte*>(values.mutable_data_ptr()));
}

void exchange_rows_of(at::TensorList storages, at::TensorList rows, at::TensorList values,
                      at::IntArrayRef offsets, at::IntArrayRef strides) {
  const std::vector<Rows> all = checked(storages, rows, values, offsets, strides);
  for (std::size_t i = 0; i < all.size(); ++i) {
    all[i].exchange(static_cast<std::byte*>(values[i].mutable_data_ptr()));
  }
}

void restore_rows(at::TensorList storages, at::TensorList rows, at::TensorList values,
                  at::IntArrayRef offsets, at::IntArrayRef strides, int64_t threads) {
  TORCH_CHECK(threads >= 1, "threads: ", threads, ", expected at least 1");
  const std::vector<Rows> all = checked(storages, rows, values, offsets, strides);
  std::vector<OldRows> old;
  old.reserve(all.size());
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (all[i].count() == 0) continue;
    old.push_back(all[i].old(static_cast<const std::byte*>(values[i].const_data_ptr())));
  }
  write_old_rows(std::move(old), static_cast<std::size_t>(threads));
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
  m.impl("restore_rows", tessera::restore_rows);
  m.impl("touch_rows_of", tessera::touch_rows_of);
  m.impl("touch_rows_aside", tessera::touch_rows_aside);
}
