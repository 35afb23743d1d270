// What several tests share: a clock that tests set, numbers as bytes, random requests.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <vector>

#include "common/clock.h"
#include "model/batch_layout.h"
#include "model/runner.h"
#include "package/schema.h"
#include "request/decoder.h"
#include "request/wire.h"

namespace tessera::test {

inline std::string text_of(const std::vector<std::byte>& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

inline std::span<const std::byte> as_bytes(const std::string& text) {
  return std::as_bytes(std::span(text));
}

// 32 bits per call, the same on every machine.
using Random = std::independent_bits_engine<std::mt19937, 32, std::uint32_t>;

class FakeClock final : public Clock {
 public:
  TimePoint now() const override { return now_; }
  void advance(Duration by) { now_ += by; }

 private:
  TimePoint now_{std::chrono::seconds(1000)};
};

template <typename T>
Bytes bytes_of(const std::vector<T>& numbers) {
  return std::as_bytes(std::span(numbers));
}

inline FeatureSpec feature(const std::string& name, Group group = Group::kIdList,
                           Hashing hashing = Hashing::kMurmur3,
                           OutOfRange out_of_range = OutOfRange::kReject, std::int64_t rows = 100) {
  return {.name = name,
          .group = group,
          .table = name,
          .rows = rows,
          .dim = 4,
          .pooling = "sum",
          .hashing = hashing,
          .vocabulary = std::nullopt,
          .out_of_range = out_of_range};
}

// Two dense features, three id_list features, one weighted feature, one output.
inline InputSchema schema() {
  InputSchema made;
  made.dense_features = {"age", "price"};
  made.dense_may_be_missing = true;
  made.features = {feature("user"), feature("item"), feature("score", Group::kIdScoreList),
                   feature("genre")};
  made.outputs = {{"default", 1}};
  return made;
}

// One request's numbers; `view` borrows them.
struct RequestData {
  std::int32_t samples = 1;
  std::vector<float> dense;
  std::vector<std::int32_t> lengths;
  std::vector<std::int64_t> values;
  std::vector<std::int32_t> narrow;  // used instead of `values` when not empty
  std::vector<std::int32_t> scored_lengths;
  std::vector<std::int64_t> scored_values;
  std::vector<float> weights;

  PredictionRequestView view(std::int32_t plain_features = 3,
                             std::int32_t scored_features = 1) const {
    PredictionRequestView made;
    made.batch_size = samples;
    made.float_features.num_features = 2;
    made.float_features.values = bytes_of(dense);
    made.id_list_features.num_features = plain_features;
    made.id_list_features.lengths = bytes_of(lengths);
    if (narrow.empty()) {
      made.id_list_features.values_int64 = bytes_of(values);
    } else {
      made.id_list_features.values = bytes_of(narrow);
    }
    made.id_score_list_features.num_features = scored_features;
    made.id_score_list_features.lengths = bytes_of(scored_lengths);
    made.id_score_list_features.values_int64 = bytes_of(scored_values);
    made.id_score_list_features.weights = bytes_of(weights);
    return made;
  }
};

// A request of schema()'s features with bags of up to `max_length` ids.
inline RequestData random_request(Random& random, std::int32_t samples, std::int32_t max_length,
                                  int plain_features = 3) {
  RequestData data;
  data.samples = samples;
  std::uniform_int_distribution<std::int32_t> length(0, max_length);
  std::uniform_int_distribution<std::int32_t> id(0, 1'000'000);
  std::uniform_real_distribution<float> number(-1, 1);
  for (int i = 0; i < 2 * samples; ++i) data.dense.push_back(number(random));
  const bool narrow = random() % 2 == 0;
  for (int i = 0; i < plain_features * samples; ++i) {
    data.lengths.push_back(length(random));
    for (int k = 0; k < data.lengths.back(); ++k) {
      if (narrow) {
        data.narrow.push_back(id(random));
      } else {
        data.values.push_back(std::int64_t{id(random)} << 20);
      }
    }
  }
  for (int i = 0; i < samples; ++i) {
    data.scored_lengths.push_back(length(random));
    for (int k = 0; k < data.scored_lengths.back(); ++k) {
      data.scored_values.push_back(id(random));
      data.weights.push_back(number(random));
    }
  }
  return data;
}

// Batches in exactly as much memory as they need, so that AddressSanitizer sees every step beside
// it, with rows of padding and int32 ids on demand.
class MemorySession : public Session {
 public:
  explicit MemorySession(InputSchema schema) : schema_(std::move(schema)) {}

  void begin_thread(int) override {}
  std::size_t bytes() const override { return memory.size(); }

  HostBatch reserve(const BatchShape& shape) override {
    const BatchLayout layout(schema_, shape, padding, shape.narrow && takes_narrow);
    memory.assign(layout.bytes(), std::byte{0xee});
    memory.shrink_to_fit();
    return layout.over(memory.data(), shape);
  }

  std::int64_t padding = 0;
  bool takes_narrow = false;
  std::vector<std::byte> memory;

 private:
  const InputSchema schema_;
};

}  // namespace tessera::test
