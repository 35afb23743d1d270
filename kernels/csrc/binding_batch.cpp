// What a batch of training goes through before its lookups, on the CPU.
#include "binding_batch.h"

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <tuple>
#include <vector>

#include "ids.h"

namespace tessera {
namespace {

using at::Tensor;

// Under this many ids another thread costs more than it brings.
constexpr int64_t kIdsPerThread = 1 << 15;

struct FeatureRule {
  int64_t rows;
  int64_t rule;
  int64_t outside;
};

// The rows of the ids `begin` to `end - 1`, which are one feature's.
template <typename Id>
void find_rows(const Id* ids, int64_t begin, int64_t end, const FeatureRule& feature,
               int64_t* out) {
  const uint64_t reciprocal = ~uint64_t{0} / static_cast<uint64_t>(feature.rows);
  bool no_row = false;
  for (int64_t i = begin; i < end; ++i) {
    out[i] = resolve_id(ids[i], feature.rows, feature.rule, feature.outside, reciprocal, &no_row);
  }
}

Tensor rows_of_ids(const Tensor& ids, const Tensor& offsets, const Tensor& rows,
                   const Tensor& rules, const Tensor& outside) {
  const int64_t batch = check_id_rows(ids, offsets, rows, rules, outside);
  Tensor found = at::empty({ids.numel()}, ids.options().dtype(at::kLong));
  const int64_t features = rows.numel();
  std::vector<int64_t> begins(features + 1);
  AT_DISPATCH_INDEX_TYPES(offsets.scalar_type(), "rows_of_ids", [&] {
    const auto* const starts = offsets.const_data_ptr<index_t>();
    for (int64_t f = 0; f <= features; ++f) begins[f] = starts[f * batch];
  });
  const auto* const table_rows = rows.const_data_ptr<int64_t>();
  for (int64_t f = 0; f < features; ++f) {
    TORCH_CHECK(begins[f] <= begins[f + 1], "offsets: those of feature ", f, " begin at ",
                begins[f], " and end at ", begins[f + 1]);
    TORCH_CHECK(table_rows[f] >= 1, "rows: feature ", f, " has ", table_rows[f],
                ", expected at least 1");
  }
  TORCH_CHECK(begins[0] == 0 && begins[features] == ids.numel(), "offsets: bags from ", begins[0],
              " to ", begins[features], " do not fit ", ids.numel(), " ids");
  const auto* const table_rules = rules.const_data_ptr<int64_t>();
  const auto* const table_outside = outside.const_data_ptr<int64_t>();
  int64_t* const out = found.mutable_data_ptr<int64_t>();
  AT_DISPATCH_INDEX_TYPES(ids.scalar_type(), "rows_of_ids", [&] {
    const auto* const given = ids.const_data_ptr<index_t>();
    at::parallel_for(0, ids.numel(), kIdsPerThread, [&](int64_t begin, int64_t end) {
      int64_t f = std::upper_bound(begins.begin(), begins.end(), begin) - begins.begin() - 1;
      for (; f < features && begins[f] < end; ++f) {
        find_rows(given, std::max(begin, begins[f]), std::min(end, begins[f + 1]),
                  {table_rows[f], table_rules[f], table_outside[f]}, out);
      }
    });
  });
  return found;
}

std::tuple<Tensor, Tensor, Tensor> unpack_rows(const Tensor& words, int64_t present, int64_t first,
                                               int64_t features, int64_t count) {
  check_packed_rows(words, present, first, features, count);
  const int64_t batch = words.size(0);
  const int64_t width = words.size(1);
  const auto wide = words.options().dtype(at::kLong);
  Tensor lengths = at::empty({features * batch}, words.options());
  Tensor offsets = at::empty({features * batch + 1}, wide);
  Tensor values = at::empty({count}, wide);
  const auto* const given = words.const_data_ptr<int32_t>();
  auto* const length_out = lengths.mutable_data_ptr<int32_t>();
  auto* const offset_out = offsets.mutable_data_ptr<int64_t>();
  auto* const value_out = values.mutable_data_ptr<int64_t>();
  int64_t place = 0;
  for (int64_t f = 0; f < features; ++f) {
    for (int64_t row = 0; row < batch; ++row) {
      const int64_t bag = f * batch + row;
      const bool there = (static_cast<uint32_t>(given[row * width + present]) >> f & 1) != 0;
      length_out[bag] = there ? 1 : 0;
      offset_out[bag] = place;
      if (!there) continue;
      if (place < count) value_out[place] = static_cast<uint32_t>(given[row * width + first + f]);
      ++place;
    }
  }
  offset_out[features * batch] = place;
  TORCH_CHECK(place == count, "count: ", place, " ids are there, got ", count);
  return {lengths, offsets, values};
}

// A row of a prepared file is a few cache lines somewhere in memory: so many are asked for ahead.
constexpr int64_t kRowsAhead = 16;
constexpr int64_t kCacheLine = 64;

std::vector<int64_t> pack_rows(const Tensor& table, const Tensor& rows, const Tensor& out,
                               int64_t present, int64_t features, at::IntArrayRef ends) {
  check_packed_rows(table, present, 0, features, 0);
  check_integers(rows, "rows", table.device());
  const int64_t width = table.size(1);
  TORCH_CHECK(rows.scalar_type() == at::kLong, "rows: int64 is needed, got ", rows.scalar_type());
  TORCH_CHECK(out.scalar_type() == at::kInt && out.dim() == 2 && out.is_contiguous() &&
                  out.size(0) == rows.numel() && out.size(1) == width && out.device().is_cpu(),
              "out: a contiguous int32 [", rows.numel(), ", ", width, "] is needed, got ",
              out.scalar_type(), " ", out.sizes());
  int64_t before = 0;
  for (const int64_t end : ends) {
    TORCH_CHECK(end >= before, "ends: ", end, " comes behind ", before);
    before = end;
  }
  TORCH_CHECK(before == rows.numel(), "ends: the last one is ", before, " of ", rows.numel(),
              " rows");
  const auto* const from = table.const_data_ptr<int32_t>();
  const auto* const wanted = rows.const_data_ptr<int64_t>();
  auto* const to = out.mutable_data_ptr<int32_t>();
  for (int64_t i = 0; i < before; ++i) {
    TORCH_CHECK(wanted[i] >= 0 && wanted[i] < table.size(0), "rows: entry ", i, " is ", wanted[i],
                ", expected 0 to ", table.size(0) - 1);
  }
  const uint32_t all = ~uint32_t{0} >> (32 - features);
  const auto row_bytes = static_cast<int64_t>(width * sizeof(int32_t));
  std::vector<int64_t> counts;
  counts.reserve(ends.size());
  int64_t i = 0;
  for (const int64_t end : ends) {
    int64_t count = 0;
    for (; i < end; ++i) {
      if (i + kRowsAhead < before) {
        const auto* const ahead =
            reinterpret_cast<const char*>(from + wanted[i + kRowsAhead] * width);
        for (int64_t at = 0; at < row_bytes; at += kCacheLine) __builtin_prefetch(ahead + at);
        __builtin_prefetch(ahead + row_bytes - 1);
      }
      const int32_t* const row = from + wanted[i] * width;
      std::copy_n(row, width, to + i * width);
      count += __builtin_popcount(static_cast<uint32_t>(row[present]) & all);
    }
    counts.push_back(count);
  }
  return counts;
}

}  // namespace
}  // namespace tessera

TORCH_LIBRARY_IMPL(tessera, CPU, m) {
  m.impl("rows_of_ids", tessera::rows_of_ids);
  m.impl("unpack_rows", tessera::unpack_rows);
  m.impl("pack_rows", tessera::pack_rows);
}
