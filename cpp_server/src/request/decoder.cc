#include "request/decoder.h"

#include <span>
#include <utility>

#include "common/text.h"
#include "request/checks.h"
#include "request/packed.h"
#include "request/strings.h"

namespace tessera {
namespace {

// No packaged model has these groups: what is sent in them would be lost silently.
Status refuse_filled(std::string_view field, std::size_t bytes, std::int32_t num_features) {
  if (bytes == 0) return {};
  return Status::invalid(text(field, " has ", bytes, " bytes (num_features ", num_features,
                              "), expected an empty message: no model here uses it"));
}

Status refuse_bytes_without_features(const GroupNames& names, const SparseFeaturesView& message) {
  const std::pair<std::string_view, Bytes> parts[] = {{names.lengths, message.lengths},
                                                      {names.values, message.values},
                                                      {names.weights, message.weights},
                                                      {names.values_int64, message.values_int64}};
  for (const auto& [name, bytes] : parts) {
    if (!bytes.empty()) {
      return Status::invalid(
          text(name, " has ", bytes.size(), " bytes, expected 0: num_features is 0"));
    }
  }
  if (message.values_bytes.count > 0) {
    return Status::invalid(text(names.values_bytes, " has ", message.values_bytes.count,
                                " strings, expected 0: num_features is 0"));
  }
  return {};
}

// Puts ids in the place of strings, if `group` has strings.
Status read_strings(std::string_view field, const std::vector<const FeatureSpec*>& features,
                    std::int64_t rows, std::vector<std::int64_t>& ids, JaggedView& group) {
  if (group.strings.count == 0) return {};
  Status status = make_ids(field, features, group.ids, group.lengths, rows, group.strings, ids);
  group.values = std::as_bytes(std::span(ids));
  return status;
}

std::vector<const FeatureSpec*> pointers(const std::vector<FeatureSpec>& features) {
  std::vector<const FeatureSpec*> found;
  found.reserve(features.size());
  for (const FeatureSpec& feature : features) found.push_back(&feature);
  return found;
}

}  // namespace

RequestDecoder::RequestDecoder(const InputSchema& schema, RequestLimits limits, bool shares_rows)
    : limits_(limits),
      shares_rows_(shares_rows),
      dense_names_(schema.dense_features),
      nan_is_missing_(schema.dense_may_be_missing),
      plain_{false, schema.group(Group::kIdList)},
      scored_{true, schema.group(Group::kIdScoreList)} {
  for (std::size_t i = 0; i < plain_.features.size(); ++i) {
    plain_position_[plain_.features[i].name] = i;
  }
}

Status RequestDecoder::decode(const PredictionRequestView& message, DecodedRequest& request,
                              const FieldNames& names) const {
  const std::int64_t B = message.batch_size;
  if (B <= 0) return Status::invalid(text("batch_size is ", B, ", expected at least 1"));
  if (B > limits_.max_samples) {
    return Status::invalid(
        text("batch_size is ", B, ", the limit is ", limits_.max_samples, " samples"));
  }
  const FloatFeaturesView& embedding = message.embedding_features;
  const SparseFeaturesView& unary = message.unary_features;
  Status status =
      refuse_filled("embedding_features", embedding.message_bytes, embedding.num_features);
  if (status.ok()) {
    status = refuse_filled("unary_features", unary.message_bytes, unary.num_features);
  }
  if (status.ok()) status = decode_dense(message.float_features, B, names.dense, request);
  Given given;
  const bool shared = message.shared_features.present;
  if (status.ok()) {
    status = shared ? decode_given(message, B, given)
                    : decode_group(plain_, names.plain, message.id_list_features,
                                   static_cast<std::int64_t>(plain_.features.size()), B,
                                   request.id_list);
  }
  if (status.ok()) {
    status =
        decode_group(scored_, names.scored, message.id_score_list_features,
                     static_cast<std::int64_t>(scored_.features.size()), B, request.id_score_list);
  }
  if (!status.ok()) return status;
  request.samples = B;
  request.shared = {};
  // Few bytes can ask for very many ids, so the sum is known before anything is spread.
  request.ids =
      (shared ? given.ids : total_ids(request.id_list)) + total_ids(request.id_score_list);
  request.out_of_range_ids = 0;
  if (request.ids > limits_.max_ids) {
    return Status::invalid(
        text("the request has ", request.ids, " ids, the limit is ", limits_.max_ids));
  }
  status = read_all_strings(names, B, given, request);
  if (!status.ok()) return status;
  status = shared
               ? join(given, B, request)
               : check_ids(plain_, names.plain.group, B, request.id_list, request.out_of_range_ids);
  if (status.ok()) {
    status =
        check_ids(scored_, names.scored.group, B, request.id_score_list, request.out_of_range_ids);
  }
  return status;
}

Status RequestDecoder::read_all_strings(const FieldNames& names, std::int64_t B, Given& given,
                                        DecodedRequest& request) const {
  auto& [plain_ids, shared_ids, scored_ids] = request.joined.string_ids;
  for (auto& ids : request.joined.string_ids) ids.clear();
  Status status;
  if (given.shared.positions.empty()) {
    status = read_strings(names.plain.values_bytes, pointers(plain_.features), B, plain_ids,
                          request.id_list);
  } else {
    std::vector<const FeatureSpec*> own = pointers(plain_.features);
    std::vector<const FeatureSpec*> shared;
    for (const std::size_t position : given.shared.positions) {
      shared.push_back(std::exchange(own[position], nullptr));
    }
    std::erase(own, nullptr);
    status = read_strings(names.plain.values_bytes, own, B, plain_ids, given.own);
    if (status.ok()) {
      status = read_strings(kSharedNames.values_bytes, shared, given.shared.rows, shared_ids,
                            given.shared.features);
    }
  }
  if (!status.ok()) return status;
  return read_strings(names.scored.values_bytes, pointers(scored_.features), B, scored_ids,
                      request.id_score_list);
}

Status RequestDecoder::decode_dense(const FloatFeaturesView& message, std::int64_t B,
                                    std::string_view name, DecodedRequest& request) const {
  const auto F = static_cast<std::int64_t>(dense_names_.size());
  if (message.num_features != F) {
    return Status::invalid(
        text("float_features.num_features is ", message.num_features, ", the model has ", F));
  }
  if (Status status =
          check_size(name, message.values, B * F, 4, "float32", "batch_size * num_features");
      !status.ok()) {
    return status;
  }
  const std::ptrdiff_t bad = first_not_finite(message.values, nan_is_missing_);
  if (bad >= 0) {
    const auto column = static_cast<std::size_t>(bad % F);
    return Status::invalid(
        text(name, ": feature '", dense_names_[column], "', row ", bad / F, " is ",
             load<float>(message.values.data(), static_cast<std::size_t>(bad)), ", expected ",
             nan_is_missing_ ? "only NaN (missing) or a finite number" : "a finite number"));
  }
  request.dense = message.values;
  return {};
}

Status RequestDecoder::decode_group(const GroupRules& rules, const GroupNames& names,
                                    const SparseFeaturesView& message, std::int64_t F,
                                    std::int64_t B, JaggedView& group) const {
  if (message.num_features != F) {
    return Status::invalid(
        text(names.num_features, " is ", message.num_features, ", expected ", F));
  }
  if (F == 0) {
    group = JaggedView{};
    return refuse_bytes_without_features(names, message);
  }
  if (Status status = read_jagged(names, message, F, B, "num_features * batch_size", group);
      !status.ok()) {
    return status;
  }
  group.weights = {};
  if (!rules.weighted) {
    if (message.weights.empty()) return {};
    return Status::invalid(text(names.weights, " has ", message.weights.size(),
                                " bytes, expected 0: these features have no weights"));
  }
  if (Status status = check_size(names.weights, message.weights, total_ids(group), 4, "float32",
                                 "sum(lengths)");
      !status.ok()) {
    return status;
  }
  const std::ptrdiff_t bad = first_not_finite(message.weights, /*nan_passes=*/false);
  if (bad >= 0) {
    return Status::invalid(text(names.weights, "[", bad, "] is ",
                                load<float>(message.weights.data(), static_cast<std::size_t>(bad)),
                                ", expected a finite number"));
  }
  group.weights = message.weights;
  return {};
}

Status RequestDecoder::decode_given(const PredictionRequestView& message, std::int64_t B,
                                    Given& given) const {
  if (Status status = decode_shared(message.shared_features, plain_position_, B,
                                    limits_.max_samples, given.shared);
      !status.ok()) {
    return status;
  }
  const auto own_features =
      static_cast<std::int64_t>(plain_.features.size() - given.shared.positions.size());
  if (Status status = decode_group(plain_, kPredictNames.plain, message.id_list_features,
                                   own_features, B, given.own);
      !status.ok()) {
    return status;
  }
  given.ids = total_ids(given.own) +
              (shares_rows_ ? total_ids(given.shared.features) : given.shared.spread_ids);
  return {};
}

namespace {

// Where one feature's ids and bags lie in a group.
struct FeatureRange {
  std::size_t first_id = 0;
  std::size_t ids = 0;
  std::size_t first_bag = 0;
};

// Counts the ids of a feature that are outside its table; refuses the first under `reject`.
Status check_feature(std::string_view field, const FeatureSpec& feature, const JaggedView& group,
                     const FeatureRange& range, std::int64_t& out_of_range) {
  if (feature.hashing != Hashing::kNone) return {};
  if (!any_outside(group, range.first_id, range.ids, feature.rows)) return {};
  std::int64_t outside = 0;
  for (std::size_t i = range.first_id; i < range.first_id + range.ids; ++i) {
    // A negative id is a huge one without its sign.
    outside +=
        static_cast<std::uint64_t>(id_at(group, i)) >= static_cast<std::uint64_t>(feature.rows);
  }
  if (outside > 0 && feature.out_of_range == OutOfRange::kReject) {
    std::size_t bag = range.first_bag;
    for (std::size_t i = range.first_id, in_bag = 0;; ++in_bag) {
      while (in_bag == static_cast<std::size_t>(load<std::int32_t>(group.lengths.data(), bag))) {
        ++bag;
        in_bag = 0;
      }
      const std::int64_t id = id_at(group, i++);
      if (id < 0 || id >= feature.rows) {
        return Status::invalid(text(field, ": feature '", feature.name, "', row ",
                                    bag - range.first_bag, ": id ", id, " is outside [0, ",
                                    feature.rows, ")"));
      }
    }
  }
  out_of_range += outside;
  return {};
}

}  // namespace

Status RequestDecoder::join(const Given& given, std::int64_t B, DecodedRequest& request) const {
  const std::size_t F = plain_.features.size();
  std::vector<std::uint8_t> flags(F, 0);
  for (const std::size_t position : given.shared.positions) flags[position] = 1;
  FeatureRange range;
  for (std::size_t f = 0, own = 0; f < F; ++f) {
    if (flags[f] != 0) continue;
    range.ids = static_cast<std::size_t>(given.own.ids[own++]);
    if (Status status = check_feature(kPredictNames.plain.group, plain_.features[f], given.own,
                                      range, request.out_of_range_ids);
        !status.ok()) {
      return status;
    }
    range.first_id += range.ids;
    range.first_bag += static_cast<std::size_t>(B);
  }
  range = {};
  for (std::size_t s = 0; s < given.shared.positions.size(); ++s) {
    range.ids = static_cast<std::size_t>(given.shared.features.ids[s]);
    if (Status status =
            check_feature(kSharedNames.group, plain_.features[given.shared.positions[s]],
                          given.shared.features, range, request.out_of_range_ids);
        !status.ok()) {
      return status;
    }
    range.first_id += range.ids;
    range.first_bag += static_cast<std::size_t>(given.shared.rows);
  }
  if (shares_rows_) {
    join_shared(given.own, given.shared, F, B, request.joined, request.id_list);
    request.shared = {std::move(flags), given.shared.rows, given.shared.row_index};
    return {};
  }
  spread_shared(given.own, given.shared, F, B, request.joined, request.id_list);
  // Counted as they will be looked up.
  request.out_of_range_ids = 0;
  return check_ids(plain_, kPredictNames.plain.group, B, request.id_list, request.out_of_range_ids);
}

Status RequestDecoder::check_ids(const GroupRules& rules, std::string_view group_name,
                                 std::int64_t B, const JaggedView& group,
                                 std::int64_t& out_of_range) const {
  FeatureRange range;
  for (std::size_t f = 0; f < rules.features.size(); ++f) {
    range.ids = static_cast<std::size_t>(group.ids[f]);
    if (Status status = check_feature(group_name, rules.features[f], group, range, out_of_range);
        !status.ok()) {
      return status;
    }
    range.first_id += range.ids;
    range.first_bag += static_cast<std::size_t>(B);
  }
  return {};
}

}  // namespace tessera
