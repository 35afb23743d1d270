// serving.yaml of a model: which versions are served, under which labels, with which shares.
//
// Contract: free functions without state; any thread; read_serving_config blocks on the file
// system. What a user got wrong throws UsageError, whose text is one line that names the file, the
// key, the value and the remedy. docs/repository.md has the format.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "batching/policy.h"
#include "batching/request_queue.h"
#include "repository/version.h"

namespace tessera {

inline constexpr std::size_t kMaxServingConfigBytes = 64 * 1024;

// Which of a folder's versions are chosen.
struct VersionChoice {
  enum class Kind { kLatest, kAll, kList };
  Kind kind = Kind::kLatest;
  std::int64_t latest = 1;         // kLatest: so many of the highest
  std::vector<Version> list = {};  // kList: ascending, all different; those that are there

  bool operator==(const VersionChoice&) const = default;
};

// A version that computes a part of the calls, too, and never answers.
struct ShadowConfig {
  Version version = 0;
  double percent = 100;  // of the calls; above 0, at most 100

  bool operator==(const ShadowConfig&) const = default;
};

// The limits of one model; nothing: those of the server's flags.
struct BatchingConfig {
  std::optional<std::int64_t> max_batch_samples = {};
  std::optional<std::int64_t> max_batch_ids = {};
  std::optional<std::int64_t> max_delay_us = {};
  std::optional<std::int64_t> max_queue_requests = {};
  std::optional<std::int64_t> max_queue_samples = {};

  bool operator==(const BatchingConfig&) const = default;

  // Puts what is set in the place of what the flags gave.
  void apply(BatchLimits& batches, QueueLimits& queue) const;
};

using Labels = std::map<std::string, Version, std::less<>>;
using Shares = std::map<std::string, double, std::less<>>;  // percent by label; 100 in sum, or none

struct ServingConfig {
  VersionChoice versions = {};
  Labels labels = {};
  Shares traffic = {};  // of labels, each of which control.json or `labels` gives a version
  std::optional<ShadowConfig> shadow = {};
  BatchingConfig batching = {};

  bool operator==(const ServingConfig&) const = default;
};

// Reads `yaml`, the content of `file` (which messages name).
ServingConfig parse_serving_config(std::string_view yaml, const std::string& file);

// The serving.yaml in a model's folder; the defaults where there is none.
ServingConfig read_serving_config(const std::string& model_folder);

}  // namespace tessera
