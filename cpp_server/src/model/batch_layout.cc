#include "model/batch_layout.h"

namespace tessera {
namespace {

std::size_t size(std::int64_t count) { return static_cast<std::size_t>(count); }

template <typename T>
std::span<T> at(std::byte* memory, std::size_t offset, std::int64_t count) {
  return {reinterpret_cast<T*>(memory + offset), size(count)};
}

}  // namespace

BatchLayout::BatchLayout(const InputSchema& schema, std::int64_t rows, std::int64_t plain_ids,
                         std::int64_t scored_ids, bool narrow)
    : rows_(rows),
      dense_features_(static_cast<std::int64_t>(schema.dense_features.size())),
      plain_features_(static_cast<std::int64_t>(schema.group_size(Group::kIdList))),
      scored_features_(static_cast<std::int64_t>(schema.group_size(Group::kIdScoreList))),
      plain_bags_(rows * plain_features_),
      narrow_(narrow) {
  place(plain_ids, scored_ids);
}

BatchLayout::BatchLayout(const InputSchema& schema, const BatchShape& shape, std::int64_t padding,
                         bool narrow)
    : BatchLayout(schema, shape.samples + padding, shape.plain_ids, shape.scored_ids, narrow) {
  if (shape.shared_features == 0) return;
  shared_ = true;
  plain_bags_ += shape.shared_features * (shape.shared_rows - rows_);
  place(shape.plain_ids, shape.scored_ids);
}

void BatchLayout::place(std::int64_t plain_ids, std::int64_t scored_ids) {
  bytes_ = 0;
  const auto take = [this](std::int64_t count, std::size_t item_bytes) {
    const std::size_t offset = bytes_;
    bytes_ += (size(count) * item_bytes + kAlignment - 1) / kAlignment * kAlignment;
    return offset;
  };
  const std::size_t id_bytes = narrow_ ? 4 : 8;
  // What has a fixed size comes first, so that a batch with few ids is a short prefix.
  offsets_.dense = take(rows_ * dense_features_, 4);
  offsets_.plain_lengths = take(plain_bags_, 4);
  offsets_.scored_lengths = take(rows_ * scored_features_, 4);
  if (shared_) {
    offsets_.shared = take(plain_features_, 1);
    offsets_.row_index = take(rows_, 4);
  }
  offsets_.scored_values = take(scored_ids, id_bytes);
  offsets_.scored_weights = take(scored_ids, 4);
  offsets_.plain_values = take(plain_ids, id_bytes);
}

HostBatch BatchLayout::over(std::byte* memory, const BatchShape& shape) const {
  const auto ids = [&](HostGroup& group, std::size_t offset, std::int64_t count) {
    if (narrow_) {
      group.narrow = at<std::int32_t>(memory, offset, count);
    } else {
      group.values = at<std::int64_t>(memory, offset, count);
    }
  };
  HostBatch batch;
  batch.samples = shape.samples;
  batch.rows = rows_;
  batch.dense_features = dense_features_;
  batch.dense = at<float>(memory, offsets_.dense, rows_ * dense_features_);
  batch.id_list.lengths = at<std::int32_t>(memory, offsets_.plain_lengths, plain_bags_);
  ids(batch.id_list, offsets_.plain_values, shape.plain_ids);
  batch.id_score_list.lengths =
      at<std::int32_t>(memory, offsets_.scored_lengths, rows_ * scored_features_);
  ids(batch.id_score_list, offsets_.scored_values, shape.scored_ids);
  batch.id_score_list.weights = at<float>(memory, offsets_.scored_weights, shape.scored_ids);
  if (shared_) {
    batch.shared = at<std::uint8_t>(memory, offsets_.shared, plain_features_);
    batch.row_index = at<std::int32_t>(memory, offsets_.row_index, rows_);
  }
  return batch;
}

std::size_t BatchLayout::used(const BatchShape& shape) const {
  return offsets_.plain_values + size(shape.plain_ids) * (narrow_ ? 4U : 8U);
}

}  // namespace tessera
