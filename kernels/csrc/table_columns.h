// The columns of a table as binding_table.cpp reads them: numbers, ids and lists of ids, each with
// Arrow's bitmap of the rows that have a value.
//
// Contract: nothing is copied, so the tensors outlive what is made of them.  Making it checks types
// and sizes; count_ids checks every list, and must have done so before copy_lists.  Any thread.
#pragma once

#include <ATen/ATen.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

namespace tessera::table {

using at::Tensor;
using at::TensorList;

// Rows of a block.  64: a word of a bitmap; 64 rows of 40 ids are 20 KiB.
constexpr int64_t kBlock = 64;
// So many rows ahead of the one that is copied, a row in no order is fetched.
constexpr int64_t kAhead = 8;

inline void check_vector(const Tensor& tensor, at::ScalarType type, const char* name) {
  TORCH_CHECK(tensor.scalar_type() == type && tensor.dim() == 1 && tensor.is_contiguous(), name,
              ": a contiguous vector of ", type, " is needed, got ", tensor.scalar_type(), " ",
              tensor.sizes());
}

// Which rows of a column have a value: Arrow's bitmap, the first row in the lowest bit of the first
// byte.  Without bits every row has one.
class Present {
 public:
  Present(const Tensor& bits, int64_t rows) {
    check_vector(bits, at::kByte, "present");
    if (bits.numel() == 0) return;
    TORCH_CHECK(bits.numel() * 8 >= rows, "present: ", bits.numel(), " bytes do not say it of ",
                rows, " rows");
    bits_ = bits.const_data_ptr<uint8_t>();
    bytes_ = bits.numel();
  }

  bool all() const { return bits_ == nullptr; }

  bool operator[](int64_t row) const {
    return bits_ == nullptr || ((bits_[row >> 3] >> (row & 7)) & 1) != 0;
  }

  // The bits of `count` <= 64 rows from `row` on, the first in the lowest bit.
  uint64_t word(int64_t row, int64_t count) const {
    const uint64_t wanted = count == 64 ? ~uint64_t{0} : (uint64_t{1} << count) - 1;
    if (bits_ == nullptr) return wanted;
    const int64_t first = row >> 3;
    const int shift = static_cast<int>(row & 7);
    uint64_t low = 0;
    std::memcpy(&low, bits_ + first, std::min<int64_t>(8, bytes_ - first));
    if (shift == 0) return low & wanted;
    const uint64_t high = first + 8 < bytes_ ? bits_[first + 8] : 0;
    return ((low >> shift) | (high << (64 - shift))) & wanted;
  }

 private:
  const uint8_t* bits_ = nullptr;
  int64_t bytes_ = 0;
};

template <typename T>
struct Column {
  const T* values;
  Present present;
};

// Columns of at least `rows` rows each.
template <typename T>
std::vector<Column<T>> columns_of(TensorList values, TensorList present, at::ScalarType type,
                                  int64_t rows, const char* name) {
  TORCH_CHECK(values.size() == present.size(), name, ": ", values.size(), " columns, but ",
              present.size(), " bitmaps");
  std::vector<Column<T>> columns;
  columns.reserve(values.size());
  for (size_t i = 0; i < values.size(); ++i) {
    check_vector(values[i], type, name);
    TORCH_CHECK(values[i].numel() >= rows, name, ": column ", i, " has ", values[i].numel(),
                " rows, expected at least ", rows);
    columns.push_back({values[i].const_data_ptr<T>(), Present(present[i], rows)});
  }
  return columns;
}

// The lists of one feature: row i has values[starts[i] : starts[i] + lengths[i]].
struct Lists {
  const int64_t* values;
  const float* weights;  // of the ids; null: they have none
  const int64_t* starts;
  const int32_t* lengths;
  int64_t ids;
  int64_t rows;
};

inline std::vector<Lists> lists_of(TensorList values, TensorList weights, TensorList starts,
                                   TensorList lengths) {
  const size_t count = values.size();
  TORCH_CHECK(weights.size() == count && starts.size() == count && lengths.size() == count,
              "lists: as many values, weights, starts and lengths are needed, got ", count, ", ",
              weights.size(), ", ", starts.size(), " and ", lengths.size());
  std::vector<Lists> lists;
  lists.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    check_vector(values[i], at::kLong, "list_values");
    check_vector(weights[i], at::kFloat, "list_weights");
    check_vector(starts[i], at::kLong, "list_starts");
    check_vector(lengths[i], at::kInt, "list_lengths");
    const int64_t ids = values[i].numel();
    TORCH_CHECK(weights[i].numel() == 0 || weights[i].numel() == ids,
                "list_weights: ", weights[i].numel(), " weights of ", ids, " ids");
    TORCH_CHECK(starts[i].numel() == lengths[i].numel(), "list_starts: ", starts[i].numel(),
                " of them, but ", lengths[i].numel(), " lengths");
    lists.push_back({values[i].const_data_ptr<int64_t>(),
                     weights[i].numel() ? weights[i].const_data_ptr<float>() : nullptr,
                     starts[i].const_data_ptr<int64_t>(), lengths[i].const_data_ptr<int32_t>(), ids,
                     starts[i].numel()});
  }
  return lists;
}

// A number of a batch's row to the number of a column's row.
struct InOrder {
  int64_t first;
  int64_t operator()(int64_t i) const { return first + i; }
};
struct Named {
  const int64_t* rows;
  int64_t operator()(int64_t i) const { return rows[i]; }
};

// The ids that the rows' lists have; every list is checked to lie within the feature's ids.
template <typename Row>
int64_t count_ids(const Lists& lists, Row row, int64_t rows) {
  int64_t ids = 0;
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t at = row(i);
    const int64_t start = lists.starts[at];
    const int64_t length = lists.lengths[at];
    TORCH_CHECK(length >= 0 && start >= 0 && start + length <= lists.ids, "lists: row ", at,
                " is said to have ", length, " ids from ", start, " on, of ", lists.ids);
    ids += length;
  }
  return ids;
}

// Copies lists one behind the other; those that lie so already in one piece.  Weights are 1 where
// the feature has none; `weights` may be null.
template <typename Row>
void copy_lists(const Lists& lists, Row row, int64_t rows, int32_t* lengths, int64_t* values,
                float* weights) {
  int64_t begin = 0;
  int64_t end = 0;
  const auto copy = [&] {
    const int64_t size = end - begin;
    std::memcpy(values, lists.values + begin, size * sizeof(int64_t));
    values += size;
    if (weights == nullptr) return;
    if (lists.weights == nullptr) {
      std::fill_n(weights, size, 1.0F);
    } else {
      std::memcpy(weights, lists.weights + begin, size * sizeof(float));
    }
    weights += size;
  };
  for (int64_t i = 0; i < rows; ++i) {
    if (i + kAhead < rows) {
      const int64_t ahead = row(i + kAhead);
      __builtin_prefetch(lists.values + lists.starts[ahead]);
    }
    const int64_t at = row(i);
    lengths[i] = lists.lengths[at];
    if (lists.starts[at] != end) {
      copy();
      begin = end = lists.starts[at];
    }
    end += lengths[i];
  }
  copy();
}

}  // namespace tessera::table
