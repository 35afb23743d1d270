#include "package/manifest.h"

#include <charconv>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <set>
#include <stdexcept>
#include <string_view>

#include "common/text.h"
#include "package/package_error.h"
#include "package/signature.h"

namespace tessera {
namespace {

using Json = nlohmann::json;

constexpr std::uint64_t kMaxManifestBytes = 256ULL << 20;
constexpr int kMaxDepth = 500;  // what is deeper could not be printed on a thread's stack

[[noreturn]] void refuse(const std::string& why) { throw std::invalid_argument(why); }

void expect_keys(const Json& object, std::string_view where,
                 std::initializer_list<std::string_view> names) {
  if (!object.is_object()) refuse(text(where, ": expected an object"));
  std::set<std::string_view> missing(names);
  for (const auto& item : object.items()) {
    if (missing.erase(item.key()) == 0) refuse(text(where, ": unknown key '", item.key(), "'"));
  }
  if (!missing.empty()) refuse(text(where, ": missing key '", *missing.begin(), "'"));
}

const Json& at(const Json& object, const char* key) { return object.at(key); }

std::string string_at(const Json& object, const char* key) {
  if (!at(object, key).is_string()) refuse(text("manifest.", key, ": expected a string"));
  return at(object, key).get<std::string>();
}

std::int64_t integer_at(const Json& object, const char* key) {
  if (!at(object, key).is_number_integer()) {
    refuse(text("manifest.", key, ": expected an integer"));
  }
  return at(object, key).get<std::int64_t>();
}

std::int64_t positive_at(const Json& object, const char* key, std::int64_t least) {
  const std::int64_t value = integer_at(object, key);
  if (value < least) refuse(text("manifest.", key, ": is ", value, ", must be >= ", least));
  return value;
}

double number_at(const Json& object, const char* key) {
  if (!at(object, key).is_number()) refuse(text("manifest.", key, ": expected a number"));
  return at(object, key).get<double>();
}

const Json& array_at(const Json& object, const char* key) {
  if (!at(object, key).is_array()) refuse(text("manifest.", key, ": expected an array"));
  return at(object, key);
}

std::vector<std::string> strings_at(const Json& object, const char* key) {
  std::vector<std::string> strings;
  for (const Json& item : array_at(object, key)) {
    if (!item.is_string()) refuse(text("manifest.", key, ": expected strings"));
    strings.push_back(item.get<std::string>());
  }
  return strings;
}

// One of a closed set of words.
template <typename T>
T word_at(const Json& object, const char* key,
          std::initializer_list<std::pair<std::string_view, T>> words) {
  const std::string found = string_at(object, key);
  for (const auto& [word, value] : words) {
    if (found == word) return value;
  }
  refuse(text("manifest.", key, ": '", found, "' is unknown"));
}

FeatureSpec read_feature(const Json& json) {
  expect_keys(json, "feature",
              {"name", "group", "table", "rows", "dim", "pooling", "hashing", "out_of_range"});
  FeatureSpec feature;
  feature.name = string_at(json, "name");
  feature.group = word_at<Group>(
      json, "group", {{"id_list", Group::kIdList}, {"id_score_list", Group::kIdScoreList}});
  feature.table = string_at(json, "table");
  feature.rows = positive_at(json, "rows", 1);
  feature.dim = positive_at(json, "dim", 1);
  feature.pooling =
      word_at<std::string>(json, "pooling", {{"sum", "sum"}, {"mean", "mean"}, {"none", "none"}});
  feature.hashing = word_at<Hashing>(
      json, "hashing",
      {{"none", Hashing::kNone}, {"modulo", Hashing::kModulo}, {"murmur3", Hashing::kMurmur3}});
  feature.out_of_range = word_at<OutOfRange>(json, "out_of_range",
                                             {{"reject", OutOfRange::kReject},
                                              {"clamp", OutOfRange::kClamp},
                                              {"hash", OutOfRange::kHash}});
  return feature;
}

InputSchema read_schema(const Json& json) {
  expect_keys(json, "schema",
              {"dense_features", "dense_missing", "dense_transform", "features", "outputs"});
  InputSchema schema;
  schema.dense_features = strings_at(json, "dense_features");
  schema.dense_may_be_missing =
      word_at<bool>(json, "dense_missing", {{"nan", true}, {"refuse", false}});
  schema.dense_transform = string_at(json, "dense_transform");
  std::set<std::string> names;
  for (const Json& item : array_at(json, "features")) {
    schema.features.push_back(read_feature(item));
    if (!names.insert(schema.features.back().name).second) {
      refuse(text("schema: feature '", schema.features.back().name, "' is there twice"));
    }
  }
  for (const Json& item : array_at(json, "outputs")) {
    expect_keys(item, "output", {"name", "width"});
    schema.outputs.push_back({string_at(item, "name"), positive_at(item, "width", 1)});
  }
  if (schema.outputs.empty()) refuse("schema: there are no outputs");
  return schema;
}

}  // namespace

MajorMinor major_minor(const std::string& version) {
  MajorMinor parsed;
  const char* const end = version.data() + version.size();
  const auto major = std::from_chars(version.data(), end, parsed.first);
  if (major.ec == std::errc() && major.ptr != end && *major.ptr == '.') {
    const auto minor = std::from_chars(major.ptr + 1, end, parsed.second);
    if (minor.ec == std::errc()) return parsed;
  }
  refuse(text("'", version, "' is not a torch version"));
}

Json parse_json(std::span<const std::byte> json) {
  const auto* const begin = reinterpret_cast<const char*>(json.data());
  // The keys met so far of every object that is open.
  std::vector<std::set<std::string>> open;
  const auto check = [&](int depth, Json::parse_event_t event, Json& value) {
    if (depth > kMaxDepth) refuse(text("the manifest is nested more than ", kMaxDepth, " deep"));
    if (event == Json::parse_event_t::object_start) open.emplace_back();
    if (event == Json::parse_event_t::object_end) open.pop_back();
    if (event == Json::parse_event_t::key) {
      const auto key = value.get<std::string>();
      if (!open.back().insert(key).second) refuse(text("key '", key, "' is there twice"));
    }
    return true;
  };
  Json root = Json::parse(begin, begin + json.size(), check, /*allow_exceptions=*/false);
  if (root.is_discarded()) refuse("the manifest is not JSON");
  return root;
}

Manifest parse_manifest(std::span<const std::byte> json) {
  const Json root = parse_json(json);
  const auto found = root.is_object() ? root.find("format_version") : root.end();
  if (!root.is_object() || found == root.end() || *found != Json(kFormatVersion)) {
    refuse(text("the package's format_version is ",
                root.is_object() && found != root.end() ? found->dump() : "missing",
                ", this server reads ", kFormatVersion,
                "; package the model again, or serve it with the tessera that wrote it"));
  }
  read_signature(json);
  expect_keys(root, "manifest",
              {"format_version",
               "name",
               "version",
               "created",
               "versions",
               "backend",
               "operator_libraries",
               "schema",
               "dtype",
               "dense_dtype",
               "tables",
               "bytes_fp32",
               "bytes_packaged",
               "plan",
               "device",
               "source",
               "training_metrics",
               "evaluation",
               "golden",
               "records",
               "signature"});
  Manifest manifest;
  manifest.name = string_at(root, "name");
  manifest.version = string_at(root, "version");
  manifest.created = string_at(root, "created");
  const Json& versions = at(root, "versions");
  expect_keys(versions, "versions", {"tessera", "torch", "fbgemm", "torch_min", "torch_below"});
  manifest.tessera_version = string_at(versions, "tessera");
  manifest.torch_version = string_at(versions, "torch");
  manifest.torch_min = major_minor(string_at(versions, "torch_min"));
  manifest.torch_below = major_minor(string_at(versions, "torch_below"));
  manifest.operator_libraries = strings_at(root, "operator_libraries");
  manifest.schema = read_schema(at(root, "schema"));
  manifest.dtype = string_at(root, "dtype");
  word_at<int>(root, "dense_dtype", {{"fp32", 0}, {"bf16", 0}});  // the graph's own business
  manifest.device = string_at(root, "device");
  for (const Json& table : array_at(root, "tables")) {
    if (!table.is_object() || !table.contains("bytes")) refuse("tables: missing key 'bytes'");
    manifest.table_bytes += static_cast<std::uint64_t>(positive_at(table, "bytes", 0));
  }
  manifest.bytes_packaged = static_cast<std::uint64_t>(positive_at(root, "bytes_packaged", 0));
  expect_keys(at(root, "plan"), "plan", {"num_shards", "placements"});
  manifest.num_shards = static_cast<int>(positive_at(at(root, "plan"), "num_shards", 1));
  const Json& golden = at(root, "golden");
  expect_keys(golden, "golden", {"samples", "atol", "rtol"});
  manifest.golden_atol = number_at(golden, "atol");
  manifest.golden_rtol = number_at(golden, "rtol");
  const Json& records = at(root, "records");
  if (!records.is_object()) refuse("manifest.records: expected an object");
  for (const auto& item : records.items()) {
    expect_keys(item.value(), "record", {"sha256", "bytes", "crc32", "chunks"});
    manifest.records[item.key()] = {
        string_at(item.value(), "sha256"),
        static_cast<std::uint64_t>(positive_at(item.value(), "bytes", 0)),
        static_cast<std::uint32_t>(positive_at(item.value(), "crc32", 0)),
        strings_at(item.value(), "chunks")};
  }
  return manifest;
}

std::vector<std::byte> read_manifest_bytes(const Records& records) {
  const std::string& path = records.file().path();
  if (!records.has(kManifestRecord)) {
    throw PackageError(path,
                       text("has no ", kManifestRecord, ": it was not written by package-model"));
  }
  return records.read(kManifestRecord, kMaxManifestBytes);
}

Manifest read_manifest(const Records& records) {
  return read_manifest(records, read_manifest_bytes(records));
}

Manifest read_manifest(const Records& records, std::span<const std::byte> content) {
  try {
    return parse_manifest(content);
  } catch (const std::invalid_argument& error) {
    throw PackageError(records.file().path(), error.what());
  }
}

}  // namespace tessera
