#include "batching/merger.h"

#include <cstring>

#include "request/packed.h"

namespace tessera {
namespace {

void copy_bytes(void* target, const std::byte* source, std::size_t bytes) {
  if (bytes > 0) std::memcpy(target, source, bytes);  // an empty view may be null
}

// Ids [begin, begin + count) of `view`, widened.
void copy_ids(std::int64_t* target, const JaggedView& view, std::size_t begin,
              std::size_t count) {
  if (view.wide) {
    copy_bytes(target, view.values.data() + begin * 8, count * 8);
    return;
  }
  for (std::size_t i = 0; i < count; ++i) {
    target[i] = load<std::int32_t>(view.values.data(), begin + i);
  }
}

}  // namespace

Merger::Merger(const InputSchema& schema) : dense_features_(schema.dense_features.size()) {
  plain_.view = &DecodedRequest::id_list;
  plain_.features = schema.group(Group::kIdList).size();
  scored_.view = &DecodedRequest::id_score_list;
  scored_.features = schema.group(Group::kIdScoreList).size();
  scored_.first_feature = plain_.features;
  scored_.weighted = true;
}

HostBatch Merger::merge(std::span<const Part> parts) {
  std::size_t samples = 0;
  for (const Part& part : parts) samples += static_cast<std::size_t>(part.samples());
  HostBatch batch;
  batch.samples = static_cast<std::int64_t>(samples);
  batch.dense_features = static_cast<std::int64_t>(dense_features_);
  batch.dense = dense_.take(samples * dense_features_);
  float* row = batch.dense.data();
  for (const Part& part : parts) {
    const std::size_t floats = static_cast<std::size_t>(part.samples()) * dense_features_;
    const std::size_t first = static_cast<std::size_t>(part.row_begin) * dense_features_;
    copy_bytes(row, part.request->request.dense.data() + first * 4, floats * 4);
    row += floats;
  }
  batch.id_list = merge_group(plain_, parts, samples);
  batch.id_score_list = merge_group(scored_, parts, samples);
  return batch;
}

HostGroup Merger::merge_group(GroupBuffers& group, std::span<const Part> parts,
                              std::size_t samples) {
  HostGroup merged;
  merged.lengths = group.lengths.take(group.features * samples);
  std::size_t ids = 0;
  for (const Part& part : parts) {
    const JaggedView& view = part.request->request.*group.view;
    for (std::size_t f = 0; f < group.features; ++f) {
      ids += static_cast<std::size_t>(part.whole() ? view.ids[f]
                                                   : part.id_count[group.first_feature + f]);
    }
  }
  merged.values = group.values.take(ids);
  merged.weights = group.weights.take(group.weighted ? ids : 0);

  const std::span<std::int64_t> begins = group.begins.take(parts.size());
  for (std::int64_t& begin : begins) begin = 0;
  std::int32_t* lengths = merged.lengths.data();
  std::size_t at = 0;
  for (std::size_t f = 0; f < group.features; ++f) {
    for (std::size_t p = 0; p < parts.size(); ++p) {
      const Part& part = parts[p];
      const DecodedRequest& request = part.request->request;
      const JaggedView& view = request.*group.view;
      const auto rows = static_cast<std::size_t>(part.samples());
      const std::size_t first_bag = f * static_cast<std::size_t>(request.samples) +
                                    static_cast<std::size_t>(part.row_begin);
      copy_bytes(lengths, view.lengths.data() + first_bag * 4, rows * 4);
      lengths += rows;
      std::size_t begin = static_cast<std::size_t>(begins[p]);
      std::size_t count = 0;
      if (part.whole()) {
        count = static_cast<std::size_t>(view.ids[f]);
        begins[p] += view.ids[f];
      } else {
        begin = static_cast<std::size_t>(part.id_begin[group.first_feature + f]);
        count = static_cast<std::size_t>(part.id_count[group.first_feature + f]);
      }
      copy_ids(merged.values.data() + at, view, begin, count);
      if (group.weighted) {
        copy_bytes(merged.weights.data() + at, view.weights.data() + begin * 4, count * 4);
      }
      at += count;
    }
  }
  return merged;
}

std::size_t Merger::bytes() const {
  std::size_t bytes = dense_.bytes();
  for (const GroupBuffers* group : {&plain_, &scored_}) {
    bytes += group->lengths.bytes() + group->values.bytes() + group->weights.bytes() +
             group->begins.bytes();
  }
  return bytes;
}

}  // namespace tessera
