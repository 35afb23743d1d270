// From a parsed message to a checked request: every size and every id is looked at here,
// because the operators read past their buffers when sizes disagree.
//
// Contract: a RequestDecoder is immutable after construction and used from any number of
// threads at once. It never blocks. What it refuses it names: field and both numbers.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "common/status.h"
#include "package/schema.h"
#include "request/decoded_request.h"
#include "request/field_names.h"
#include "request/shared.h"
#include "request/wire.h"

namespace tessera {

// The largest request, which may have as many rows of shared features as samples. Ids count as they
// are looked up: those of shared features once where the model shares rows, else once per sample
// that uses them.
struct RequestLimits {
  std::int64_t max_samples = 16'384;
  std::int64_t max_ids = 4'194'304;
};

class RequestDecoder {
 public:
  // `shares_rows`: the model takes shared features as they are; otherwise every sample gets its own
  // copy of them.
  RequestDecoder(const InputSchema& schema, RequestLimits limits, bool shares_rows = false);

  // Checks `message` and fills `request`, whose memory is reused. On a refusal `request` is
  // left in no particular state. `names` is how the client knows what it sent.
  Status decode(const PredictionRequestView& message, DecodedRequest& request,
                const FieldNames& names = kPredictNames) const;

 private:
  // One group's features, by position.
  struct GroupRules {
    bool weighted = false;
    std::vector<FeatureSpec> features;
  };

  Status decode_dense(const FloatFeaturesView& message, std::int64_t B, std::string_view name,
                      DecodedRequest& request) const;
  Status decode_group(const GroupRules& rules, const GroupNames& names,
                      const SparseFeaturesView& message, std::int64_t F, std::int64_t B,
                      JaggedView& group) const;
  // The id_list features of a message with shared ones as they came; join or spread follows.
  struct Given {
    JaggedView own;
    SharedGroup shared;
    std::int64_t ids = 0;  // as they will be looked up
  };
  Status decode_given(const PredictionRequestView& message, std::int64_t B, Given& given) const;
  // Puts ids in the place of the strings of every group.
  Status read_all_strings(const FieldNames& names, std::int64_t B, Given& given,
                          DecodedRequest& request) const;
  // Checks what was given, id by id, and fills request.id_list.
  Status join(const Given& given, std::int64_t B, DecodedRequest& request) const;
  Status check_ids(const GroupRules& rules, std::string_view group_name, std::int64_t B,
                   const JaggedView& group, std::int64_t& out_of_range) const;

  RequestLimits limits_;
  bool shares_rows_;
  std::vector<std::string> dense_names_;
  bool nan_is_missing_;
  GroupRules plain_;
  GroupRules scored_;
  std::unordered_map<std::string, std::size_t> plain_position_;
};

}  // namespace tessera
