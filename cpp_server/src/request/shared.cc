#include "request/shared.h"

#include <algorithm>
#include <span>

#include "common/text.h"
#include "request/checks.h"
#include "request/packed.h"

namespace tessera {
namespace {

Status decode_names(const SharedFeaturesView& message,
                    const std::unordered_map<std::string, std::size_t>& position,
                    std::vector<std::size_t>& positions) {
  if (message.names.size() > position.size()) {
    return Status::invalid(text("shared_features.names has ", message.names.size(),
                                " names, the model has only ", position.size(),
                                " id_list features"));
  }
  for (const std::string_view name : message.names) {
    const auto found = position.find(std::string(name));
    if (found == position.end()) {
      return Status::invalid(text("shared_features.names has '", name,
                                  "', which is not an id_list feature of the model"));
    }
    positions.push_back(found->second);
  }
  if (positions.empty()) {
    return Status::invalid("shared_features.names has 0 names, expected at least 1");
  }
  std::vector<std::size_t> sorted = positions;
  std::sort(sorted.begin(), sorted.end());
  const auto distinct = std::unique(sorted.begin(), sorted.end()) - sorted.begin();
  if (static_cast<std::size_t>(distinct) != positions.size()) {
    return Status::invalid(text("shared_features.names has ", positions.size(), " names of which ",
                                distinct, " differ"));
  }
  return {};
}

// Where each bag of `group` begins among its ids: [bags].
std::vector<std::int64_t> bag_begins(const JaggedView& group) {
  const std::size_t bags = group.lengths.size() / 4;
  std::vector<std::int64_t> begins(bags);
  std::int64_t at = 0;
  for (std::size_t i = 0; i < bags; ++i) {
    begins[i] = at;
    at += load<std::int32_t>(group.lengths.data(), i);
  }
  return begins;
}

}  // namespace

Status decode_shared(const SharedFeaturesView& message,
                     const std::unordered_map<std::string, std::size_t>& position, std::int64_t B,
                     std::int64_t max_rows, SharedGroup& shared) {
  if (Status status = decode_names(message, position, shared.positions); !status.ok()) {
    return status;
  }
  const auto S = static_cast<std::int64_t>(shared.positions.size());
  const std::int64_t R = message.num_rows;
  shared.rows = R;
  if (R < 1) {
    return Status::invalid(text("shared_features.num_rows is ", R, ", expected at least 1"));
  }
  if (R > max_rows) {
    return Status::invalid(
        text("shared_features.num_rows is ", R, ", the limit is ", max_rows, " rows"));
  }
  if (message.features.num_features != S) {
    return Status::invalid(text("shared_features.features.num_features is ",
                                message.features.num_features, ", expected ", S, " (names)"));
  }
  if (!message.features.weights.empty()) {
    return Status::invalid(text("shared_features.features.weights has ",
                                message.features.weights.size(),
                                " bytes, expected 0: these features have no weights"));
  }
  if (Status status = read_jagged(kSharedNames, message.features, S, R, "len(names) * num_rows",
                                  shared.features);
      !status.ok()) {
    return status;
  }
  shared.row_index = message.row_index;
  if (Status status =
          check_size("shared_features.row_index", shared.row_index, B, 4, "int32", "batch_size");
      !status.ok()) {
    return status;
  }
  // Few bytes can ask for very many ids, so the sum is known before anything is spread.
  std::vector<std::int64_t> row_ids(static_cast<std::size_t>(R), 0);
  for (std::int64_t i = 0; i < S * R; ++i) {
    row_ids[static_cast<std::size_t>(i % R)] +=
        load<std::int32_t>(shared.features.lengths.data(), static_cast<std::size_t>(i));
  }
  for (std::int64_t b = 0; b < B; ++b) {
    const auto row = load<std::int32_t>(shared.row_index.data(), static_cast<std::size_t>(b));
    if (row < 0 || row >= R) {
      return Status::invalid(
          text("shared_features.row_index[", b, "] is ", row, ", expected [0, ", R, ")"));
    }
    shared.spread_ids += row_ids[static_cast<std::size_t>(row)];
  }
  return {};
}

namespace {

constexpr std::size_t kOwn = static_cast<std::size_t>(-1);

// The place of each of the F features among the shared ones, or kOwn.
std::vector<std::size_t> shared_places(const SharedGroup& shared, std::size_t F) {
  std::vector<std::size_t> places(F, kOwn);
  for (std::size_t s = 0; s < shared.positions.size(); ++s) places[shared.positions[s]] = s;
  return places;
}

void view_storage(const JoinedStorage& storage, JaggedView& group) {
  group.lengths = std::as_bytes(std::span(storage.lengths));
  group.values = std::as_bytes(std::span(storage.values));
  group.weights = {};
  group.wide = true;
}

}  // namespace

void join_shared(const JaggedView& own, const SharedGroup& shared, std::size_t F, std::int64_t B,
                 JoinedStorage& storage, JaggedView& group) {
  const std::vector<std::size_t> places = shared_places(shared, F);
  storage.lengths.clear();
  storage.values.clear();
  storage.lengths.reserve((own.lengths.size() + shared.features.lengths.size()) / 4);
  storage.values.reserve(static_cast<std::size_t>(total_ids(own) + total_ids(shared.features)));
  group.ids.assign(F, 0);
  // The next feature of either source: its place and its first id.
  std::size_t own_feature = 0;
  std::size_t own_begin = 0;
  std::vector<std::size_t> shared_begin(shared.positions.size(), 0);
  for (std::size_t s = 1; s < shared_begin.size(); ++s) {
    shared_begin[s] = shared_begin[s - 1] + static_cast<std::size_t>(shared.features.ids[s - 1]);
  }
  for (std::size_t f = 0; f < F; ++f) {
    const bool is_own = places[f] == kOwn;
    const JaggedView& source = is_own ? own : shared.features;
    const std::size_t feature = is_own ? own_feature : places[f];
    const auto bags = static_cast<std::size_t>(is_own ? B : shared.rows);
    const std::size_t begin = is_own ? own_begin : shared_begin[places[f]];
    for (std::size_t bag = feature * bags; bag < (feature + 1) * bags; ++bag) {
      storage.lengths.push_back(load<std::int32_t>(source.lengths.data(), bag));
    }
    const auto count = static_cast<std::size_t>(source.ids[feature]);
    for (std::size_t i = begin; i < begin + count; ++i) {
      storage.values.push_back(id_at(source, i));
    }
    group.ids[f] = source.ids[feature];
    if (is_own) {
      ++own_feature;
      own_begin += count;
    }
  }
  view_storage(storage, group);
}

void spread_shared(const JaggedView& own, const SharedGroup& shared, std::size_t F, std::int64_t B,
                   JoinedStorage& storage, JaggedView& group) {
  const auto samples = static_cast<std::size_t>(B);
  const auto R = static_cast<std::size_t>(shared.rows);
  const std::vector<std::size_t> shared_at = shared_places(shared, F);
  const std::vector<std::int64_t> own_begins = bag_begins(own);
  const std::vector<std::int64_t> shared_begins = bag_begins(shared.features);

  storage.lengths.resize(F * samples);
  storage.values.clear();
  storage.values.reserve(static_cast<std::size_t>(shared.spread_ids + total_ids(own)));
  group.ids.assign(F, 0);
  std::size_t own_feature = 0;
  for (std::size_t f = 0; f < F; ++f) {
    const bool is_own = shared_at[f] == kOwn;
    const JaggedView& source = is_own ? own : shared.features;
    const std::vector<std::int64_t>& begins = is_own ? own_begins : shared_begins;
    const std::size_t first_bag = is_own ? own_feature++ * samples : shared_at[f] * R;
    for (std::size_t b = 0; b < samples; ++b) {
      const std::size_t row =
          is_own ? b : static_cast<std::size_t>(load<std::int32_t>(shared.row_index.data(), b));
      const auto length = load<std::int32_t>(source.lengths.data(), first_bag + row);
      storage.lengths[f * samples + b] = length;
      const auto begin = static_cast<std::size_t>(begins[first_bag + row]);
      for (std::size_t k = 0; k < static_cast<std::size_t>(length); ++k) {
        storage.values.push_back(id_at(source, begin + k));
      }
      group.ids[f] += length;
    }
  }
  view_storage(storage, group);
}

}  // namespace tessera
