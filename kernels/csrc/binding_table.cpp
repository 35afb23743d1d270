// Rows of a table's columns to the arrays of a batch, on the CPU.
//
// Shapes: B rows of a batch, n rows of a column, D dense columns, S features of one id, L features
// with lists, F = S + L, N ids.  A batch is feature-major: lengths [F * B], values [N] feature
// after feature.
//
// Everything here is bound by memory: every value is read and written once.  Rows are taken in
// blocks, so that what is interleaved or transposed stays in the first cache.  A call uses one
// thread; loaders have several that call.
#include <ATen/ATen.h>
#include <torch/library.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <limits>
#include <tuple>
#include <vector>

#include "recycled.h"
#include "table_columns.h"

namespace tessera {
namespace {

using namespace table;

void check_matrix_of(const Tensor& tensor, at::ScalarType type, const char* name) {
  TORCH_CHECK(tensor.scalar_type() == type && tensor.dim() == 2 && tensor.is_contiguous(), name,
              ": a contiguous matrix of ", type, " is needed, got ", tensor.scalar_type(), " ",
              tensor.sizes());
}

// A batch's tensors, allocated once their sizes are known.
struct Batch {
  Tensor dense;
  Tensor lengths;
  Tensor values;
  Tensor weights;  // empty: not wanted

  Batch(int64_t rows, int64_t dense_columns, int64_t features, int64_t ids, bool weighted)
      : dense(memory().empty({rows, dense_columns}, at::kFloat)),
        lengths(memory().empty({features * rows}, at::kInt)),
        values(memory().empty({ids}, at::kLong)),
        weights(memory().empty({weighted ? ids : 0}, at::kFloat)) {}

  static RecycledMemory& memory() { return RecycledMemory::process(); }
};

using Batched = std::tuple<Tensor, Tensor, Tensor, Tensor>;

// The lists of a batch behind `at` ids of features with one.
template <typename Row>
void write_lists(const std::vector<Lists>& lists, const std::vector<int64_t>& sizes, Row row,
                 int64_t rows, int64_t singles, int64_t at, Batch& batch) {
  float* const weights = batch.weights.numel() ? batch.weights.mutable_data_ptr<float>() : nullptr;
  if (weights != nullptr) std::fill_n(weights, at, 1.0F);
  for (size_t i = 0; i < lists.size(); ++i) {
    copy_lists(
        lists[i], row, rows,
        batch.lengths.mutable_data_ptr<int32_t>() + (singles + static_cast<int64_t>(i)) * rows,
        batch.values.mutable_data_ptr<int64_t>() + at, weights ? weights + at : nullptr);
    at += sizes[i];
  }
}

// Writes the columns' numbers row by row, NaN where there is none.
void interleave_numbers(const std::vector<Column<float>>& columns, int64_t first, int64_t rows,
                        float* out) {
  const auto width = static_cast<int64_t>(columns.size());
  for (int64_t begin = 0; begin < rows; begin += kBlock) {
    const int64_t count = std::min(kBlock, rows - begin);
    for (int64_t c = 0; c < width; ++c) {
      const float* const from = columns[c].values + first + begin;
      float* const to = out + begin * width + c;
      const uint64_t word = columns[c].present.word(first + begin, count);
      for (int64_t i = 0; i < count; ++i) {
        to[i * width] = (word >> i) & 1 ? from[i] : std::numeric_limits<float>::quiet_NaN();
      }
    }
  }
}

// The ids of one feature without gaps, and 1 or 0 for each row; returns how many ids there are.
int64_t copy_present(const Column<int64_t>& column, int64_t first, int64_t rows, int32_t* lengths,
                     int64_t* values) {
  if (column.present.all()) {
    std::memcpy(values, column.values + first, rows * sizeof(int64_t));
    std::fill_n(lengths, rows, 1);
    return rows;
  }
  int64_t* to = values;
  int64_t packed[kBlock + 1];
  for (int64_t begin = 0; begin < rows; begin += kBlock) {
    const int64_t count = std::min(kBlock, rows - begin);
    const int64_t* const from = column.values + first + begin;
    const uint64_t word = column.present.word(first + begin, count);
    // Written behind the last in any case, and kept if there is an id: no branch to guess.
    int64_t found = 0;
    for (int64_t i = 0; i < count; ++i) {
      const auto bit = static_cast<int64_t>((word >> i) & 1);
      packed[found] = from[i];
      lengths[begin + i] = static_cast<int32_t>(bit);
      found += bit;
    }
    std::memcpy(to, packed, found * sizeof(int64_t));
    to += found;
  }
  return to - values;
}

int64_t count_present(const Present& present, int64_t first, int64_t rows) {
  if (present.all()) return rows;
  int64_t found = 0;
  for (int64_t begin = 0; begin < rows; begin += kBlock) {
    found += std::popcount(present.word(first + begin, std::min(kBlock, rows - begin)));
  }
  return found;
}

// See ../ops.py: a batch of neighbouring rows of columns.
Batched table_batch(TensorList dense, TensorList dense_present, TensorList ids,
                    TensorList ids_present, TensorList list_values, TensorList list_weights,
                    TensorList list_starts, TensorList list_lengths, int64_t first, int64_t rows,
                    bool weighted) {
  TORCH_CHECK(first >= 0 && rows >= 0, "first and rows: at least 0 is needed, got ", first, " and ",
              rows);
  const auto numbers = columns_of<float>(dense, dense_present, at::kFloat, first + rows, "dense");
  const auto singles = columns_of<int64_t>(ids, ids_present, at::kLong, first + rows, "ids");
  const auto lists = lists_of(list_values, list_weights, list_starts, list_lengths);
  const InOrder row{first};
  int64_t of_singles = 0;
  for (const auto& column : singles) of_singles += count_present(column.present, first, rows);
  int64_t total = of_singles;
  std::vector<int64_t> sizes;
  for (const auto& one : lists) {
    TORCH_CHECK(one.rows >= first + rows, "lists: ", one.rows, " rows, expected at least ",
                first + rows);
    sizes.push_back(count_ids(one, row, rows));
    total += sizes.back();
  }
  const auto S = static_cast<int64_t>(singles.size());
  Batch batch(rows, static_cast<int64_t>(numbers.size()), S + static_cast<int64_t>(lists.size()),
              total, weighted);
  interleave_numbers(numbers, first, rows, batch.dense.mutable_data_ptr<float>());
  int64_t at = 0;
  for (int64_t s = 0; s < S; ++s) {
    at +=
        copy_present(singles[s], first, rows, batch.lengths.mutable_data_ptr<int32_t>() + s * rows,
                     batch.values.mutable_data_ptr<int64_t>() + at);
  }
  write_lists(lists, sizes, row, rows, S, at, batch);
  return {batch.dense, batch.lengths, batch.values, batch.weights};
}

void check_rows(const Tensor& rows, int64_t limit) {
  check_vector(rows, at::kLong, "rows");
  const int64_t* const at = rows.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < rows.numel(); ++i) {
    TORCH_CHECK(at[i] >= 0 && at[i] < limit, "rows: entry ", i, " is ", at[i], ", expected 0 to ",
                limit - 1);
  }
}

int64_t mask_words(int64_t features) { return (features + kBlock - 1) / kBlock; }

// See ../ops.py: columns into the rows of a matrix, those of `rows` or, if that is empty, all.
void table_interleave(TensorList dense, TensorList dense_present, TensorList ids,
                      TensorList ids_present, const c10::optional<Tensor>& rows,
                      const Tensor& dense_out, const Tensor& ids_out, const Tensor& masks_out) {
  check_matrix_of(dense_out, at::kFloat, "dense_out");
  check_matrix_of(ids_out, at::kLong, "ids_out");
  check_matrix_of(masks_out, at::kLong, "masks_out");
  const int64_t n = ids_out.size(0);
  const auto D = static_cast<int64_t>(dense.size());
  const auto S = static_cast<int64_t>(ids.size());
  const int64_t W = mask_words(S);
  TORCH_CHECK(dense_out.size(0) == n && dense_out.size(1) == D && ids_out.size(1) == S &&
                  masks_out.size(0) == n && masks_out.size(1) == W,
              "out: [n, ", D, "], [n, ", S, "] and [n, ", W, "] are needed, got ",
              dense_out.sizes(), ", ", ids_out.sizes(), " and ", masks_out.sizes());
  int64_t needed = n;
  if (rows.has_value()) {
    TORCH_CHECK(rows->numel() == n, "rows: ", rows->numel(), " of them, expected ", n);
    needed = 0;
    for (TensorList list : {dense, ids}) {
      for (const Tensor& column : list) needed = std::max(needed, column.numel());
    }
    if (D + S > 0) check_rows(*rows, needed);
  }
  const auto numbers = columns_of<float>(dense, dense_present, at::kFloat, needed, "dense");
  const auto singles = columns_of<int64_t>(ids, ids_present, at::kLong, needed, "ids");
  float* const to_dense = dense_out.mutable_data_ptr<float>();
  int64_t* const to_ids = ids_out.mutable_data_ptr<int64_t>();
  auto* const to_masks = reinterpret_cast<uint64_t*>(masks_out.mutable_data_ptr<int64_t>());
  std::fill_n(to_masks, n * W, ~uint64_t{0});
  const auto write = [&](auto row, auto word_of) {
    for (int64_t begin = 0; begin < n; begin += kBlock) {
      const int64_t count = std::min(kBlock, n - begin);
      for (int64_t c = 0; c < D; ++c) {
        const float* const from = numbers[c].values;
        float* const to = to_dense + begin * D + c;
        const uint64_t word = word_of(numbers[c].present, begin, count);
        for (int64_t i = 0; i < count; ++i) {
          to[i * D] =
              (word >> i) & 1 ? from[row(begin + i)] : std::numeric_limits<float>::quiet_NaN();
        }
      }
      for (int64_t c = 0; c < S; ++c) {
        const int64_t* const from = singles[c].values;
        int64_t* const to = to_ids + begin * S + c;
        for (int64_t i = 0; i < count; ++i) to[i * S] = from[row(begin + i)];
        if (singles[c].present.all()) continue;
        const uint64_t lacking = ~word_of(singles[c].present, begin, count);
        uint64_t* const masks = to_masks + begin * W + c / kBlock;
        for (int64_t i = 0; i < count; ++i) masks[i * W] ^= ((lacking >> i) & 1) << (c % kBlock);
      }
    }
  };
  if (rows.has_value()) {
    const Named row{rows->const_data_ptr<int64_t>()};
    write(row, [&](const Present& present, int64_t begin, int64_t count) {
      uint64_t word = 0;
      for (int64_t i = 0; i < count; ++i) {
        word |= uint64_t{present[row(begin + i)]} << i;
      }
      return word;
    });
  } else {
    write(InOrder{0}, [](const Present& present, int64_t begin, int64_t count) {
      return present.word(begin, count);
    });
  }
}

// See ../ops.py: a batch of rows in any order, of what `table_interleave` wrote.
Batched table_batch_at(const Tensor& dense, const Tensor& ids, const Tensor& masks,
                       TensorList list_values, TensorList list_weights, TensorList list_starts,
                       TensorList list_lengths, const Tensor& rows, bool weighted) {
  check_matrix_of(dense, at::kFloat, "dense");
  check_matrix_of(ids, at::kLong, "ids");
  check_matrix_of(masks, at::kLong, "masks");
  const int64_t n = ids.size(0);
  const int64_t D = dense.size(1);
  const int64_t S = ids.size(1);
  const int64_t W = mask_words(S);
  TORCH_CHECK(dense.size(0) == n && masks.size(0) == n && masks.size(1) == W, "dense: [", n,
              ", D] and masks [", n, ", ", W, "] are needed, got ", dense.sizes(), " and ",
              masks.sizes());
  check_rows(rows, n);
  const auto lists = lists_of(list_values, list_weights, list_starts, list_lengths);
  const int64_t B = rows.numel();
  const Named row{rows.const_data_ptr<int64_t>()};
  const int64_t* const from_ids = ids.const_data_ptr<int64_t>();
  const auto* const there = reinterpret_cast<const uint64_t*>(masks.const_data_ptr<int64_t>());
  // Of the batch's rows, which features have an id, and how many rows each feature lacks one in.
  std::vector<uint64_t> own_masks(B * W);
  std::vector<int64_t> lacking(S, 0);
  for (int64_t i = 0; i < B; ++i) {
    if (i + kAhead < B) __builtin_prefetch(there + row(i + kAhead) * W);
    for (int64_t w = 0; w < W; ++w) {
      const uint64_t mask = there[row(i) * W + w];
      own_masks[i * W + w] = mask;
      const int64_t features = std::min(kBlock, S - w * kBlock);
      for (uint64_t left = ~mask; left != 0; left &= left - 1) {
        const int bit = std::countr_zero(left);
        if (bit >= features) break;
        ++lacking[w * kBlock + bit];
      }
    }
  }
  std::vector<int64_t> at(S + 1, 0);  // where the ids of each feature go next
  for (int64_t s = 0; s < S; ++s) at[s + 1] = at[s] + B - lacking[s];
  const int64_t of_singles = at[S];
  int64_t total = of_singles;
  std::vector<int64_t> sizes;
  for (const auto& one : lists) {
    TORCH_CHECK(one.rows >= n, "lists: ", one.rows, " rows, expected ", n);
    sizes.push_back(count_ids(one, row, B));
    total += sizes.back();
  }
  Batch batch(B, D, S + static_cast<int64_t>(lists.size()), total, weighted);
  float* const to_dense = batch.dense.mutable_data_ptr<float>();
  int32_t* const lengths = batch.lengths.mutable_data_ptr<int32_t>();
  int64_t* const values = batch.values.mutable_data_ptr<int64_t>();
  const float* const from_dense = dense.const_data_ptr<float>();
  // Rows are copied together first: columns that are written 8 * B bytes apart fall into the same
  // few lines of the cache.
  std::vector<int64_t> block(kBlock * S);
  int64_t packed[kBlock + 1];
  for (int64_t begin = 0; begin < B; begin += kBlock) {
    const int64_t count = std::min(kBlock, B - begin);
    for (int64_t i = 0; i < count; ++i) {
      if (begin + i + kAhead < B) {
        const float* const next = from_dense + row(begin + i + kAhead) * D;
        for (int64_t c = 0; c < D; c += 16) __builtin_prefetch(next + c);
        const int64_t* const ahead = from_ids + row(begin + i + kAhead) * S;
        for (int64_t s = 0; s < S; s += 8) __builtin_prefetch(ahead + s);
      }
      const int64_t from = row(begin + i);
      std::copy_n(from_dense + from * D, D, to_dense + (begin + i) * D);
      std::copy_n(from_ids + from * S, S, block.data() + i * S);
    }
    for (int64_t s = 0; s < S; ++s) {
      int32_t* const own = lengths + s * B + begin;
      if (lacking[s] == 0) {
        int64_t* const to = values + at[s];
        for (int64_t i = 0; i < count; ++i) to[i] = block[i * S + s];
        std::fill_n(own, count, 1);
        at[s] += count;
        continue;
      }
      int64_t found = 0;
      for (int64_t i = 0; i < count; ++i) {
        const auto bit =
            static_cast<int64_t>((own_masks[(begin + i) * W + s / kBlock] >> (s % kBlock)) & 1);
        packed[found] = block[i * S + s];
        own[i] = static_cast<int32_t>(bit);
        found += bit;
      }
      std::memcpy(values + at[s], packed, found * sizeof(int64_t));
      at[s] += found;
    }
  }
  write_lists(lists, sizes, row, B, S, of_singles, batch);
  return {batch.dense, batch.lengths, batch.values, batch.weights};
}

}  // namespace
}  // namespace tessera

TORCH_LIBRARY_IMPL(tessera, CompositeExplicitAutograd, m) {
  m.impl("table_batch", tessera::table_batch);
  m.impl("table_interleave", tessera::table_interleave);
  m.impl("table_batch_at", tessera::table_batch_at);
}
