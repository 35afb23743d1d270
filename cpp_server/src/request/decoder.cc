#include "request/decoder.h"

#include "common/text.h"
#include "request/checks.h"
#include "request/packed.h"
#include "request/shared.h"

namespace tessera {
namespace {

// No packaged model has these groups: what is sent in them would be lost silently.
Status refuse_filled(std::string_view field, std::size_t bytes, std::int32_t num_features) {
  if (bytes == 0) return {};
  return Status::invalid(text(field, " has ", bytes, " bytes (num_features ", num_features,
                              "), expected an empty message: no model here uses it"));
}

Status refuse_bytes_without_features(std::string_view field, const SparseFeaturesView& message) {
  const std::pair<const char*, Bytes> parts[] = {{"lengths", message.lengths},
                                                 {"values", message.values},
                                                 {"weights", message.weights},
                                                 {"values_int64", message.values_int64}};
  for (const auto& [name, bytes] : parts) {
    if (!bytes.empty()) {
      return Status::invalid(text(field, ".", name, " has ", bytes.size(),
                                  " bytes, expected 0: num_features is 0"));
    }
  }
  return {};
}

}  // namespace

RequestDecoder::RequestDecoder(const InputSchema& schema, RequestLimits limits)
    : limits_(limits),
      dense_names_(schema.dense_features),
      nan_is_missing_(schema.dense_may_be_missing),
      plain_{"id_list_features", false, schema.group(Group::kIdList)},
      scored_{"id_score_list_features", true, schema.group(Group::kIdScoreList)} {
  for (std::size_t i = 0; i < plain_.features.size(); ++i) {
    plain_position_[plain_.features[i].name] = i;
  }
}

Status RequestDecoder::decode(const PredictionRequestView& message,
                              DecodedRequest& request) const {
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
  if (status.ok()) status = decode_dense(message.float_features, B, request);
  if (status.ok()) {
    status = message.shared_features.present
                 ? decode_with_shared(message, B, request)
                 : decode_group(plain_, message.id_list_features,
                                static_cast<std::int64_t>(plain_.features.size()), B,
                                request.id_list);
  }
  if (status.ok()) {
    status = decode_group(scored_, message.id_score_list_features,
                          static_cast<std::int64_t>(scored_.features.size()), B,
                          request.id_score_list);
  }
  if (!status.ok()) return status;
  request.samples = B;
  request.ids = total_ids(request.id_list) + total_ids(request.id_score_list);
  request.out_of_range_ids = 0;
  status = check_total(request.ids);
  if (status.ok()) status = check_ids(plain_, B, request.id_list, request.out_of_range_ids);
  if (status.ok()) {
    status = check_ids(scored_, B, request.id_score_list, request.out_of_range_ids);
  }
  return status;
}

Status RequestDecoder::check_total(std::int64_t ids) const {
  if (ids <= limits_.max_ids) return {};
  return Status::invalid(text("the request has ", ids, " ids, the limit is ", limits_.max_ids));
}

Status RequestDecoder::decode_dense(const FloatFeaturesView& message, std::int64_t B,
                                    DecodedRequest& request) const {
  const auto F = static_cast<std::int64_t>(dense_names_.size());
  if (message.num_features != F) {
    return Status::invalid(
        text("float_features.num_features is ", message.num_features, ", the model has ", F));
  }
  if (Status status = check_size("float_features", "values", message.values, B * F, 4, "float32",
                                 "batch_size * num_features");
      !status.ok()) {
    return status;
  }
  const std::ptrdiff_t bad = first_not_finite(message.values, nan_is_missing_);
  if (bad >= 0) {
    const auto column = static_cast<std::size_t>(bad % F);
    return Status::invalid(text(
        "float_features.values: feature '", dense_names_[column], "', row ", bad / F, " is ",
        load<float>(message.values.data(), static_cast<std::size_t>(bad)), ", expected ",
        nan_is_missing_ ? "only NaN (missing) or a finite number" : "a finite number"));
  }
  request.dense = message.values;
  return {};
}

Status RequestDecoder::decode_group(const GroupRules& rules, const SparseFeaturesView& message,
                                    std::int64_t F, std::int64_t B, JaggedView& group) const {
  if (message.num_features != F) {
    return Status::invalid(text(rules.field, ".num_features is ", message.num_features,
                                ", expected ", F));
  }
  if (F == 0) {
    group = JaggedView{};
    return refuse_bytes_without_features(rules.field, message);
  }
  if (Status status =
          read_jagged(rules.field, message, F, B, "num_features * batch_size", group);
      !status.ok()) {
    return status;
  }
  group.weights = {};
  if (!rules.weighted) {
    if (message.weights.empty()) return {};
    return Status::invalid(text(rules.field, ".weights has ", message.weights.size(),
                                " bytes, expected 0: these features have no weights"));
  }
  if (Status status = check_size(rules.field, "weights", message.weights,
                                 total_ids(group), 4, "float32", "sum(lengths)");
      !status.ok()) {
    return status;
  }
  const std::ptrdiff_t bad = first_not_finite(message.weights, /*nan_passes=*/false);
  if (bad >= 0) {
    return Status::invalid(
        text(rules.field, ".weights[", bad, "] is ",
             load<float>(message.weights.data(), static_cast<std::size_t>(bad)),
             ", expected a finite number"));
  }
  group.weights = message.weights;
  return {};
}

Status RequestDecoder::decode_with_shared(const PredictionRequestView& message, std::int64_t B,
                                          DecodedRequest& request) const {
  SharedGroup shared;
  if (Status status = decode_shared(message.shared_features, plain_position_, B, shared);
      !status.ok()) {
    return status;
  }
  JaggedView own;
  const std::size_t F = plain_.features.size();
  const auto own_features = static_cast<std::int64_t>(F - shared.positions.size());
  if (Status status = decode_group(plain_, message.id_list_features, own_features, B, own);
      !status.ok()) {
    return status;
  }
  if (Status status = check_total(total_ids(own) + shared.spread_ids); !status.ok()) {
    return status;
  }
  spread_shared(own, shared, F, B, request.spread, request.id_list);
  return {};
}

Status RequestDecoder::check_ids(const GroupRules& rules, std::int64_t B, const JaggedView& group,
                                 std::int64_t& out_of_range) const {
  std::size_t begin = 0;
  for (std::size_t f = 0; f < rules.features.size(); ++f) {
    const FeatureSpec& feature = rules.features[f];
    const auto count = static_cast<std::size_t>(group.ids[f]);
    if (feature.hashing == Hashing::kNone) {
      std::int64_t outside = 0;
      for (std::size_t i = begin; i < begin + count; ++i) {
        // A negative id is a huge one without its sign.
        outside += static_cast<std::uint64_t>(id_at(group, i)) >=
                   static_cast<std::uint64_t>(feature.rows);
      }
      if (outside > 0 && feature.out_of_range == OutOfRange::kReject) {
        std::size_t bag = f * static_cast<std::size_t>(B);
        const std::size_t first_bag = bag;
        for (std::size_t i = begin, in_bag = 0;; ++in_bag) {
          while (in_bag == static_cast<std::size_t>(
                               load<std::int32_t>(group.lengths.data(), bag))) {
            ++bag;
            in_bag = 0;
          }
          const std::int64_t id = id_at(group, i++);
          if (id < 0 || id >= feature.rows) {
            return Status::invalid(text(rules.field, ": feature '", feature.name, "', row ",
                                        bag - first_bag, ": id ", id, " is outside [0, ",
                                        feature.rows, ")"));
          }
        }
      }
      out_of_range += outside;
    }
    begin += count;
  }
  return {};
}

}  // namespace tessera
