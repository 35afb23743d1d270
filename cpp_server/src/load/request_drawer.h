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
  std::int64_t samples = 1;    // of each request
  std::int64_t ids_per_bag = 1;
  std::int64_t shared_features = 0;  // the first ones of id_list, given once per request
};

class RequestDrawer {
 public:
  RequestDrawer(const InputSchema& schema, DrawOptions options, std::uint64_t seed)
      : schema_(schema), options_(options), random_(seed) {}

  // A serialised PredictionRequest.
  std::string draw();

 private:
  std::int64_t draw_id(const FeatureSpec& feature);

  const InputSchema& schema_;
  const DrawOptions options_;
  std::mt19937_64 random_;
};

}  // namespace tessera
