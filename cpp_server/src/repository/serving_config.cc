#include "repository/serving_config.h"

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cmath>
#include <numeric>

#include "common/flags.h"
#include "common/nearest.h"
#include "common/text.h"
#include "repository/small_file.h"
#include "repository/yaml_tree.h"

namespace tessera {
namespace {

using Kind = YamlTree::Kind;

constexpr double kWhole = 100;          // percent
constexpr double kSumTolerance = 1e-6;  // of decimal fractions that binary ones do not meet
constexpr std::int64_t kMaxDelayUs = 60'000'000;

[[noreturn]] void refuse(const std::string& key, const YamlTree& value, const std::string& remedy) {
  throw UsageError(text(key, " is ", value.shown(), "; ", remedy));
}

// `scalar` as a message shows text.
YamlTree text_tree(const std::string& scalar) {
  YamlTree tree;
  tree.kind = Kind::kScalar;
  tree.quoted = true;
  tree.scalar = scalar;
  return tree;
}

// The decimal number that a plain scalar writes.
template <typename T>
std::optional<T> plain_number(const YamlTree& value) {
  if (value.kind != Kind::kScalar || value.quoted || value.scalar.empty()) return std::nullopt;
  T number{};
  const char* const begin = value.scalar.data();
  const char* const end = begin + value.scalar.size();
  const auto [stopped, error] = std::from_chars(begin, end, number);
  if (error != std::errc() || stopped != end) return std::nullopt;
  return number;
}

std::int64_t read_whole(const std::string& key, const YamlTree& value, std::int64_t least,
                        std::int64_t most = std::numeric_limits<std::int64_t>::max()) {
  const auto number = plain_number<std::int64_t>(value);
  // 010 is 8 in YAML 1.1 and 10 in 1.2.
  const bool clear = number && value.scalar == std::to_string(*number);
  if (!clear || *number < least) {
    refuse(key, value, text("give a whole number of at least ", least));
  }
  if (*number > most) refuse(key, value, text("give ", most, " at most"));
  return *number;
}

Version read_version(const std::string& key, const YamlTree& value) {
  const auto version =
      value.kind == Kind::kScalar && !value.quoted ? parse_version(value.scalar) : std::nullopt;
  if (!version) refuse(key, value, "give a version, a positive whole number");
  return *version;
}

// A number of percent from 0 to 100; `above` excludes 0.
double read_percent(const std::string& key, const YamlTree& value, bool above) {
  const auto percent = plain_number<double>(value);
  const bool fits = percent && *percent <= kWhole && (above ? *percent > 0 : *percent >= 0);
  if (!fits) {
    refuse(key, value,
           above ? "give a percentage above 0 and up to 100" : "give a percentage from 0 to 100");
  }
  return *percent;
}

[[noreturn]] void refuse_key(const std::string& section, const std::string& key,
                             const std::vector<std::string>& known) {
  const std::string near = nearest(key, known);
  std::string all;
  for (const std::string& name : known) all += (all.empty() ? "" : ", ") + name;
  throw UsageError(text(section, section.empty() ? "" : ": ", "key is ", text_tree(key).shown(),
                        "; give one of ", all, near.empty() ? "" : "; did you mean " + near + "?"));
}

void require_map(const std::string& key, const YamlTree& value, const std::string& example) {
  if (value.kind != Kind::kMap) refuse(key, value, "give a mapping such as " + example);
}

std::vector<Version> read_version_list(const YamlTree& value) {
  std::vector<Version> list;
  for (const YamlTree& item : value.items) {
    list.push_back(read_version("versions: a version", item));
  }
  std::sort(list.begin(), list.end());
  if (list.empty() || std::adjacent_find(list.begin(), list.end()) != list.end()) {
    refuse("versions", value, "give at least one version, and each once");
  }
  return list;
}

[[noreturn]] void refuse_choice(const YamlTree& value) {
  refuse("versions", value, "give {latest: N}, all, or a list such as [3, 7]");
}

VersionChoice read_versions(const YamlTree& value) {
  VersionChoice choice;
  if (value.kind == Kind::kScalar && value.scalar == "all") {
    choice.kind = VersionChoice::Kind::kAll;
  } else if (value.kind == Kind::kList) {
    choice.kind = VersionChoice::Kind::kList;
    choice.list = read_version_list(value);
  } else if (value.kind == Kind::kMap) {
    if (value.fields.size() != 1 || value.fields.front().first != "latest") refuse_choice(value);
    const YamlTree& latest = value.fields.front().second;
    const auto count = parse_version(latest.quoted ? "" : latest.scalar);
    if (!count) refuse("versions.latest", latest, "give how many, a positive whole number");
    choice.latest = *count;
  } else {
    refuse_choice(value);
  }
  return choice;
}

void check_label(const std::string& section, const std::string& label) {
  if (!is_label(label)) refuse(section + ": a label", text_tree(label), "give " + label_rule());
}

Labels read_labels(const YamlTree& value) {
  Labels labels;
  require_map("labels", value, "{stable: 3}");
  for (const auto& [label, field] : value.fields) {
    check_label("labels", label);
    labels[label] = read_version("labels." + label, field);
  }
  return labels;
}

Shares read_traffic(const YamlTree& value) {
  Shares shares;
  double sum = 0;
  require_map("traffic", value, "{stable: 95, canary: 5}");
  for (const auto& [label, field] : value.fields) {
    check_label("traffic", label);
    shares[label] = read_percent("traffic." + label, field, false);
    sum += shares[label];
  }
  if (!shares.empty() && std::abs(sum - kWhole) > kSumTolerance) {
    throw UsageError(text("traffic is ", sum, " percent in sum; let its shares be 100 in sum"));
  }
  return shares;
}

ShadowConfig read_shadow(const YamlTree& value) {
  ShadowConfig shadow;
  require_map("shadow", value, "{version: 4, share: 10}");
  for (const auto& [key, field] : value.fields) {
    if (key == "version") {
      shadow.version = read_version("shadow.version", field);
    } else if (key == "share") {
      shadow.percent = read_percent("shadow.share", field, true);
    } else {
      refuse_key("shadow", key, {"version", "share"});
    }
  }
  if (shadow.version == 0) {
    refuse("shadow.version", {}, "give a version, a positive whole number");
  }
  return shadow;
}

BatchingConfig read_batching(const YamlTree& value) {
  BatchingConfig batching;
  struct Key {
    std::string name;
    std::optional<std::int64_t>* target;
    std::int64_t least;
    std::int64_t most;
  };
  constexpr std::int64_t kAny = std::numeric_limits<std::int64_t>::max();
  const Key keys[] = {{"max_batch_samples", &batching.max_batch_samples, 1, kAny},
                      {"max_batch_ids", &batching.max_batch_ids, 1, kAny},
                      {"max_delay_us", &batching.max_delay_us, 0, kMaxDelayUs},
                      {"max_queue_requests", &batching.max_queue_requests, 1, kAny},
                      {"max_queue_samples", &batching.max_queue_samples, 1, kAny}};
  require_map("batching", value, "{max_batch_samples: 256}");
  for (const auto& [name, field] : value.fields) {
    const auto* const key =
        std::find_if(std::begin(keys), std::end(keys),
                     [&name = name](const Key& known) { return known.name == name; });
    if (key == std::end(keys)) {
      std::vector<std::string> known;
      for (const Key& one : keys) known.push_back(one.name);
      refuse_key("batching", name, known);
    }
    *key->target = read_whole("batching." + name, field, key->least, key->most);
  }
  return batching;
}

ServingConfig read_config(const YamlTree& tree) {
  ServingConfig config;
  if (tree.kind == Kind::kNull) return config;  // an empty file
  if (tree.kind != Kind::kMap)
    throw UsageError("expected keys such as 'versions: {latest: 2}' at the top of the file");
  for (const auto& [key, value] : tree.fields) {
    if (key == "versions") {
      config.versions = read_versions(value);
    } else if (key == "labels") {
      config.labels = read_labels(value);
    } else if (key == "traffic") {
      config.traffic = read_traffic(value);
    } else if (key == "shadow") {
      config.shadow = read_shadow(value);
    } else if (key == "batching") {
      config.batching = read_batching(value);
    } else {
      refuse_key("", key, {"versions", "labels", "traffic", "shadow", "batching"});
    }
  }
  return config;
}

}  // namespace

void BatchingConfig::apply(BatchLimits& batches, QueueLimits& queue) const {
  batches.max_samples = max_batch_samples.value_or(batches.max_samples);
  batches.max_ids = max_batch_ids.value_or(batches.max_ids);
  if (max_delay_us) batches.max_delay = std::chrono::microseconds(*max_delay_us);
  queue.max_requests = max_queue_requests.value_or(queue.max_requests);
  queue.max_samples = max_queue_samples.value_or(queue.max_samples);
}

ServingConfig parse_serving_config(std::string_view yaml, const std::string& file) {
  try {
    return read_config(parse_yaml(yaml));
  } catch (const UsageError& error) {
    throw UsageError(text(file, ": ", error.what()));
  }
}

ServingConfig read_serving_config(const std::string& model_folder) {
  const std::string path = model_folder + "/serving.yaml";
  const std::optional<std::string> yaml = read_small_file(path, kMaxServingConfigBytes);
  return yaml ? parse_serving_config(*yaml, path) : ServingConfig{};
}

}  // namespace tessera
