// The description of a served model's inputs and outputs, as the manifest gives it.
//
// Contract: plain values, never changed once read; shared freely between threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace tessera {

enum class Group { kIdList, kIdScoreList };
enum class Hashing { kNone, kModulo, kMurmur3, kVocabulary };
enum class OutOfRange { kReject, kClamp, kHash };

// One sparse feature and the table that it looks up.
struct FeatureSpec {
  std::string name;
  Group group = Group::kIdList;
  bool strings = false;  // ids may be given as strings: XXH64 of their UTF-8 bytes
  bool hex = false;      // or else as texts of 1 to 8 hexadecimal digits, not of decimal ones
  std::string table;
  std::int64_t rows = 0;  // of the table
  std::int64_t dim = 0;
  std::string pooling;  // "sum", "mean" or "none"
  Hashing hashing = Hashing::kNone;
  std::optional<std::int64_t> vocabulary;  // its number, under Hashing::kVocabulary
  // What happens under Hashing::kNone to an id outside [0, rows).
  OutOfRange out_of_range = OutOfRange::kReject;
};

// One output: [B] when width is 1, else [B, width], float32.
struct OutputSpec {
  std::string name;
  std::int64_t width = 1;
};

// What the training rows held of a dense feature: finite values from least to most, or none.
struct DenseRange {
  std::optional<float> least;
  std::optional<float> most;
};

struct InputSchema {
  std::vector<std::string> dense_features;
  std::vector<DenseRange> dense_ranges;  // by dense feature; empty: that is not known
  bool dense_may_be_missing = false;     // NaN stands for a missing value; else NaN is refused
  std::vector<FeatureSpec> features;
  std::vector<OutputSpec> outputs;

  // The features of `group`, in the order of that group's lengths.
  std::vector<FeatureSpec> group(Group group) const {
    std::vector<FeatureSpec> chosen;
    for (const FeatureSpec& feature : features) {
      if (feature.group == group) chosen.push_back(feature);
    }
    return chosen;
  }

  // How many those are: what is asked of each batch copies none of them.
  std::size_t group_size(Group group) const {
    std::size_t size = 0;
    for (const FeatureSpec& feature : features) size += feature.group == group ? 1 : 0;
    return size;
  }
};

}  // namespace tessera
