#include "batching/merger.h"

#include <algorithm>
#include <cstring>

#include "request/packed.h"

namespace tessera {
namespace {

void copy_bytes(void* target, const std::byte* source, std::size_t bytes) {
  if (bytes > 0) std::memcpy(target, source, bytes);  // an empty view may be null
}

// Ids [begin, begin + count) of `view` to index `at` of `merged`, widened where it is wide.
void copy_ids(const HostGroup& merged, std::size_t at, const JaggedView& view, std::size_t begin,
              std::size_t count) {
  if (view.wide) {
    copy_bytes(merged.values.data() + at, view.values.data() + begin * 8, count * 8);
  } else if (!merged.narrow.empty()) {
    copy_bytes(merged.narrow.data() + at, view.values.data() + begin * 4, count * 4);
  } else {
    std::int64_t* const target = merged.values.data() + at;
    for (std::size_t i = 0; i < count; ++i) {
      target[i] = load<std::int32_t>(view.values.data(), begin + i);
    }
  }
}

// The rows of the batch that a part has.
std::int64_t rows_of(const Part& part) {
  return part.request->request.shared.any() ? part.shared_end - part.shared_begin : part.samples();
}

// What the parts share; nothing where none does.
const SharedRows& sharing(std::span<const Part> parts) {
  for (const Part& part : parts) {
    if (part.request->request.shared.any()) return part.request->request.shared;
  }
  return parts.front().request->request.shared;
}

// The row of each sample; padding takes the first.
void fill_row_index(std::span<const Part> parts, std::span<std::int32_t> index) {
  std::int32_t* next = index.data();
  std::int64_t first = 0;
  for (const Part& part : parts) {
    const SharedRows& shared = part.request->request.shared;
    for (std::int64_t i = 0; i < part.samples(); ++i) {
      const std::int64_t row =
          shared.any() ? load<std::int32_t>(shared.row_index.data(),
                                            static_cast<std::size_t>(part.row_begin + i)) -
                             part.shared_begin
                       : i;
      *next++ = static_cast<std::int32_t>(first + row);
    }
    first += rows_of(part);
  }
  std::fill(next, index.data() + index.size(), 0);
}

}  // namespace

Merger::Merger(const InputSchema& schema) : dense_features_(schema.dense_features.size()) {
  plain_.view = &DecodedRequest::id_list;
  plain_.features = schema.group_size(Group::kIdList);
  scored_.view = &DecodedRequest::id_score_list;
  scored_.features = schema.group_size(Group::kIdScoreList);
  scored_.first_feature = plain_.features;
  scored_.weighted = true;
}

HostBatch Merger::merge(std::span<const Part> parts, Session& session) {
  BatchShape shape{.narrow = true};
  for (const Part& part : parts) {
    const DecodedRequest& request = part.request->request;
    shape.samples += part.samples();
    shape.narrow = shape.narrow && !request.id_list.wide && !request.id_score_list.wide;
  }
  const SharedRows& shared = sharing(parts);
  if (shared.any()) {
    shape.shared_features = std::count(shared.features.begin(), shared.features.end(), 1);
    for (const Part& part : parts) shape.shared_rows += rows_of(part);
  }
  shape.plain_ids = count_ids(plain_, parts);
  shape.scored_ids = count_ids(scored_, parts);
  const HostBatch batch = session.reserve(shape);
  float* row = batch.dense.data();
  for (const Part& part : parts) {
    const std::size_t floats = static_cast<std::size_t>(part.samples()) * dense_features_;
    const std::size_t first = static_cast<std::size_t>(part.row_begin) * dense_features_;
    copy_bytes(row, part.request->request.dense.data() + first * 4, floats * 4);
    row += floats;
  }
  const auto padding = static_cast<std::size_t>(batch.rows - batch.samples);
  std::fill_n(row, padding * dense_features_, 0.0F);
  fill(plain_, parts, shared, padding, batch.id_list);
  fill(scored_, parts, SharedRows{}, padding, batch.id_score_list);
  if (shared.any()) {
    std::copy(shared.features.begin(), shared.features.end(), batch.shared.begin());
    fill_row_index(parts, batch.row_index);
  }
  return batch;
}

std::int64_t Merger::count_ids(const GroupView& group, std::span<const Part> parts) {
  std::int64_t ids = 0;
  for (const Part& part : parts) {
    const JaggedView& view = part.request->request.*group.view;
    for (std::size_t f = 0; f < group.features; ++f) {
      ids += part.whole() ? view.ids[f] : part.id_count[group.first_feature + f];
    }
  }
  return ids;
}

void Merger::fill(const GroupView& group, std::span<const Part> parts, const SharedRows& shared,
                  std::size_t padding, const HostGroup& merged) {
  const std::span<std::int64_t> begins = begins_.take(parts.size());
  const std::span<std::size_t> bags = bags_.take(parts.size());
  std::fill(begins.begin(), begins.end(), 0);
  std::fill(bags.begin(), bags.end(), std::size_t{0});
  std::int32_t* lengths = merged.lengths.data();
  std::size_t at = 0;
  for (std::size_t f = 0; f < group.features; ++f) {
    for (std::size_t p = 0; p < parts.size(); ++p) {
      const Part& part = parts[p];
      const DecodedRequest& request = part.request->request;
      const JaggedView& view = request.*group.view;
      // A request that shares nothing gives a row per sample of a shared feature, too.
      const bool once = shared.has(f) && request.shared.any();
      const auto rows = static_cast<std::size_t>(once ? rows_of(part) : part.samples());
      const std::size_t first_bag =
          bags[p] + static_cast<std::size_t>(once ? part.shared_begin : part.row_begin);
      copy_bytes(lengths, view.lengths.data() + first_bag * 4, rows * 4);
      lengths += rows;
      bags[p] += static_cast<std::size_t>(once ? request.shared.rows : request.samples);
      std::size_t begin = static_cast<std::size_t>(begins[p]);
      std::size_t count = 0;
      if (part.whole()) {
        count = static_cast<std::size_t>(view.ids[f]);
        begins[p] += view.ids[f];
      } else {
        begin = static_cast<std::size_t>(part.id_begin[group.first_feature + f]);
        count = static_cast<std::size_t>(part.id_count[group.first_feature + f]);
      }
      copy_ids(merged, at, view, begin, count);
      if (group.weighted) {
        copy_bytes(merged.weights.data() + at, view.weights.data() + begin * 4, count * 4);
      }
      at += count;
    }
    if (!shared.has(f)) lengths = std::fill_n(lengths, padding, 0);
  }
}

}  // namespace tessera
