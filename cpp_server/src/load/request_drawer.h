// Requests drawn at random from a model's schema, as the bytes that go on the wire.
//
// Contract: one thread; the same seed gives the same requests.
#pragma once

#include <cstdint>
#include <random>
#include <string>

#include "package/schema.h"

namespace tessera {

struct DrawOptions {
  std::int64_t samples = 1;  // of each request
  // A number for each feature in the schema's order, or one for all.
  std::vector<std::int64_t> ids_per_bag = {1};
  bool int32_ids = false;
  std::int64_t shared_features = 0;  // the first ones of id_list, given once per request
};

class RequestDrawer {
 public:
  // Throws UsageError when the numbers of ids are neither one nor one per feature.
  RequestDrawer(const InputSchema& schema, DrawOptions options, std::uint64_t seed);

  // A serialised PredictionRequest.
  std::string draw();

 private:
  std::int64_t draw_id(const FeatureSpec& feature);
  std::int64_t bag_size(std::size_t feature) const {
    return options_.ids_per_bag[options_.ids_per_bag.size() == 1 ? 0 : feature];
  }

  const InputSchema& schema_;
  const DrawOptions options_;
  std::mt19937_64 random_;
};

}  // namespace tessera
