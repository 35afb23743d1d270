// Rows of a table that change places with others on the CPU: how a server applies a commit.
//
// One pass over a table in memory: what was in the table lies in `values` afterwards, so the call
// that applies a commit makes its undo record, and the same call with that record undoes it.  Rows
// are far apart, so each is a miss of the caches and of the TLB; they are asked for kAhead rows
// before their turn.
#include <ATen/ATen.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace tessera {
namespace {

using at::Tensor;

// Rows asked for ahead of the one that is exchanged: more than a core keeps misses open for rows of
// 2 or 3 lines.
constexpr int64_t kAhead = 12;
constexpr int64_t kLine = 64;
// Of a wide row so much is asked for; the processor finds the rest itself.
constexpr int64_t kAsked = 256;

// Of a size that the compiler knows, so that registers hold what is moved.
template <int64_t kBytes>
void exchange_piece(uint8_t* a, uint8_t* b) {
  uint8_t first[kBytes];
  uint8_t second[kBytes];
  std::memcpy(first, a, kBytes);
  std::memcpy(second, b, kBytes);
  std::memcpy(a, second, kBytes);
  std::memcpy(b, first, kBytes);
}

void exchange(uint8_t* a, uint8_t* b, int64_t bytes) {
  int64_t at = 0;
  for (; at + 64 <= bytes; at += 64) exchange_piece<64>(a + at, b + at);
  for (; at + 16 <= bytes; at += 16) exchange_piece<16>(a + at, b + at);
  for (; at + 4 <= bytes; at += 4) exchange_piece<4>(a + at, b + at);
  for (; at < bytes; ++at) exchange_piece<1>(a + at, b + at);
}

void check_rows(const int64_t* rows, int64_t count, int64_t limit) {
  int64_t before = -1;
  for (int64_t i = 0; i < count; ++i) {
    TORCH_CHECK(rows[i] > before && rows[i] < limit, "rows: entry ", i, " is ", rows[i],
                ", expected more than ", before, " and less than ", limit);
    before = rows[i];
  }
}

void exchange_rows(const Tensor& storage, const Tensor& rows, const Tensor& values, int64_t offset,
                   int64_t stride) {
  TORCH_CHECK(storage.scalar_type() == at::kByte && storage.dim() == 1 && storage.is_contiguous(),
              "storage: a contiguous uint8 vector is needed, got ", storage.scalar_type(), " ",
              storage.sizes());
  TORCH_CHECK(rows.scalar_type() == at::kLong && rows.dim() == 1 && rows.is_contiguous(),
              "rows: a contiguous int64 vector is needed, got ", rows.scalar_type(), " ",
              rows.sizes());
  TORCH_CHECK(values.scalar_type() == at::kByte && values.dim() == 2 && values.is_contiguous() &&
                  values.size(0) == rows.numel(),
              "values: contiguous uint8 [", rows.numel(), ", width] is needed, got ",
              values.scalar_type(), " ", values.sizes());
  const int64_t width = values.size(1);
  TORCH_CHECK(width >= 1 && stride >= width, "stride: ", stride, ", expected the width ", width,
              " or more, of at least 1");
  TORCH_CHECK(offset >= 0 && offset <= storage.numel(), "offset: ", offset, ", expected 0 to ",
              storage.numel());
  const int64_t room = storage.numel() - offset;
  const int64_t limit = room < width ? 0 : (room - width) / stride + 1;
  const int64_t* const row = rows.const_data_ptr<int64_t>();
  const int64_t count = rows.numel();
  check_rows(row, count, limit);
  uint8_t* const table = storage.mutable_data_ptr<uint8_t>() + offset;
  uint8_t* const value = values.mutable_data_ptr<uint8_t>();
  for (int64_t i = 0; i < count; ++i) {
    if (i + kAhead < count) {
      const uint8_t* const next = table + row[i + kAhead] * stride;
      for (int64_t at = 0; at < width + kLine - 1 && at < kAsked; at += kLine) {
        __builtin_prefetch(next + std::min(at, width - 1), 1);
      }
    }
    exchange(table + row[i] * stride, value + i * width, width);
  }
}

}  // namespace
}  // namespace tessera

TORCH_LIBRARY_IMPL(tessera, CPU, m) { m.impl("exchange_rows", tessera::exchange_rows); }
