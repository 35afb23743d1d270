// How many values of each feature were missing, or are outside of what the training rows held, as
// the package says it. Which features are counted is the same in both servers.
//
// Contract: count may be called from any thread and does not block; names and numbers may be read
// at any time.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "model/vocabularies.h"
#include "package/schema.h"
#include "request/decoded_request.h"

namespace tessera {

class FeatureCounter {
 public:
  // One number of the metrics page.
  struct Row {
    const std::string& feature;
    std::uint64_t count;
  };

  // `vocabularies` may have no keys; then their features' ids are not counted.
  FeatureCounter(const InputSchema& schema, const VocabularyBuffers& buffers);

  // Counts a request that has been checked.
  void count(const DecodedRequest& request);

  std::vector<Row> missing() const;  // of the dense features
  std::vector<Row> outside() const;  // of the dense features, then of those with a vocabulary

 private:
  // A sparse feature, by its group and in its order there.
  struct Feature {
    std::int64_t vocabulary = -1;  // -1: it has none
    std::size_t count = 0;         // where its count stands
  };

  void count_dense(const DecodedRequest& request);
  void count_ids(const std::vector<Feature>& features, const JaggedView& group);

  std::vector<std::string> dense_names_;  // empty where the package does not say their ranges
  std::vector<std::string> outside_names_;
  std::vector<float> least_;
  std::vector<float> most_;
  std::vector<Feature> plain_;
  std::vector<Feature> scored_;
  Vocabularies vocabularies_;
  bool looks_at_ids_ = false;
  std::unique_ptr<std::atomic<std::uint64_t>[]> missing_;
  std::unique_ptr<std::atomic<std::uint64_t>[]> outside_;
};

}  // namespace tessera
