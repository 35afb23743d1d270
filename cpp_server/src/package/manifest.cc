#include "package/manifest.h"

#include <algorithm>
#include <charconv>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <set>
#include <stdexcept>
#include <string_view>

#include "common/text.h"
#include "package/field_rules.h"
#include "package/format_rules.h"
#include "package/package_error.h"
#include "package/signature.h"
#include "package/strict_json.h"

namespace tessera {
namespace {

using Json = nlohmann::json;

[[noreturn]] void refuse(const std::string& why) { throw std::invalid_argument(why); }

// The value that a word stands for; check_manifest_fields has seen that it is one of them.
template <typename T>
T value_of(const Json& word, std::initializer_list<std::pair<std::string_view, T>> words) {
  for (const auto& [name, value] : words) {
    if (word == name) return value;
  }
  throw std::logic_error(text("'", word.get<std::string>(), "' has no value here"));
}

FeatureSpec read_feature(const Json& json) {
  FeatureSpec feature;
  feature.strings = json.value("strings", false);
  feature.hex = json.value("hex", false);
  feature.name = json.at("name").get<std::string>();
  feature.group = value_of<Group>(
      json.at("group"), {{"id_list", Group::kIdList}, {"id_score_list", Group::kIdScoreList}});
  feature.table = json.at("table").get<std::string>();
  feature.rows = json.at("rows").get<std::int64_t>();
  feature.dim = json.at("dim").get<std::int64_t>();
  feature.pooling = json.at("pooling").get<std::string>();
  feature.hashing = value_of<Hashing>(json.at("hashing"), {{"none", Hashing::kNone},
                                                           {"modulo", Hashing::kModulo},
                                                           {"murmur3", Hashing::kMurmur3},
                                                           {"vocabulary", Hashing::kVocabulary}});
  if (const auto number = json.find("vocabulary"); number != json.end() && !number->is_null()) {
    feature.vocabulary = number->get<std::int64_t>();
  }
  feature.out_of_range =
      value_of<OutOfRange>(json.at("out_of_range"), {{"reject", OutOfRange::kReject},
                                                     {"clamp", OutOfRange::kClamp},
                                                     {"hash", OutOfRange::kHash}});
  return feature;
}

std::vector<DenseRange> read_ranges(const Json& json) {
  std::vector<DenseRange> ranges;
  for (const Json& item : json) {
    const Json& least = item.at("least");
    const Json& most = item.at("most");
    const bool ordered = least.is_null()
                             ? most.is_null()
                             : !most.is_null() && least.get<double>() <= most.get<double>();
    if (!ordered) {
      refuse(text("manifest.schema.dense_ranges[", ranges.size(),
                  "]: is not a range from least to most"));
    }
    ranges.emplace_back();
    if (!least.is_null()) ranges.back() = {least.get<float>(), most.get<float>()};
  }
  return ranges;
}

InputSchema read_schema(const Json& json) {
  InputSchema schema;
  schema.dense_features = json.at("dense_features").get<std::vector<std::string>>();
  schema.dense_may_be_missing = json.at("dense_missing") == "nan";
  for (const Json& item : json.at("features")) schema.features.push_back(read_feature(item));
  for (const Json& item : json.at("outputs")) {
    schema.outputs.push_back(
        {item.at("name").get<std::string>(), item.at("width").get<std::int64_t>()});
  }
  if (schema.outputs.empty()) refuse("manifest.schema.outputs: there is none");
  if (const auto columns = json.find("dense_columns");
      columns != json.end() && columns->size() != schema.dense_features.size()) {
    refuse(text("manifest.schema.dense_columns: has ", columns->size(), " names, expected ",
                schema.dense_features.size()));
  }
  if (const auto ranges = json.find("dense_ranges"); ranges != json.end()) {
    schema.dense_ranges = read_ranges(*ranges);
    const std::size_t found = schema.dense_ranges.size();
    if (found != 0 && found != schema.dense_features.size()) {
      refuse(text("manifest.schema.dense_ranges: has ", found, " entries, expected ",
                  schema.dense_features.size()));
    }
  }
  return schema;
}

// The names of `items`, each of which must be there once.
std::set<std::string> names_of(const Json& items, std::string_view where) {
  std::set<std::string> names;
  for (const Json& item : items) {
    const auto name = item.at("name").get<std::string>();
    if (!names.insert(name).second)
      refuse(text("manifest.", where, ": '", name, "' is there twice"));
  }
  return names;
}

// What no single field's rule says.
void check_together(const Json& root) {
  names_of(root.at("schema").at("features"), "schema.features");
  names_of(root.at("schema").at("outputs"), "schema.outputs");
  const std::set<std::string> tables = names_of(root.at("tables"), "tables");
  const auto shards = root.at("plan").at("num_shards").get<std::int64_t>();
  for (const Json& placement : root.at("plan").at("placements")) {
    const auto shard = placement.at("shard").get<std::int64_t>();
    const auto table = placement.at("table").get<std::string>();
    if (shard >= shards) {
      refuse(text("manifest.plan.placements: a shard is ", shard, " of ", shards, " shards"));
    }
    if (!tables.contains(table)) {
      refuse(text("manifest.plan.placements: '", table, "' is not one of the tables"));
    }
  }
}

// The version that a manifest says it has; refuses one that is not read here.
int read_format_version(const Json& root) {
  const auto found = root.is_object() ? root.find("format_version") : root.end();
  const bool known = root.is_object() && found != root.end() && found->is_number_integer();
  for (int version = kOldestFormatVersion; known && version <= kFormatVersion; ++version) {
    if (*found == Json(version)) return version;
  }
  refuse(text("the package's format_version is ", known ? found->dump() : "missing",
              ", this server reads ", kOldestFormatVersion, " to ", kFormatVersion,
              "; package the model again, or serve it with the tessera that wrote it"));
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

std::map<std::string, RecordInfo> read_record_infos(const Json& records) {
  std::map<std::string, RecordInfo> infos;
  for (const auto& item : records.items()) {
    infos[item.key()] = {item.value().at("sha256").get<std::string>(),
                         item.value().at("bytes").get<std::uint64_t>(),
                         item.value().at("crc32").get<std::uint32_t>(),
                         item.value().at("chunks").get<std::vector<std::string>>()};
  }
  return infos;
}

Manifest parse_manifest(std::span<const std::byte> json) {
  const Json root = parse_ascii_json(json, "the manifest", kMaxManifestMarks);
  const int version = read_format_version(root);
  read_signature(json);
  check_manifest_fields(root, version);
  check_together(root);
  Manifest manifest;
  manifest.name = root.at("name").get<std::string>();
  manifest.version = root.at("version").get<std::string>();
  manifest.created = root.at("created").get<std::string>();
  const Json& versions = root.at("versions");
  manifest.tessera_version = versions.at("tessera").get<std::string>();
  manifest.torch_version = versions.at("torch").get<std::string>();
  manifest.torch_min = major_minor(versions.at("torch_min").get<std::string>());
  manifest.torch_below = major_minor(versions.at("torch_below").get<std::string>());
  manifest.operator_libraries = root.at("operator_libraries").get<std::vector<std::string>>();
  manifest.schema = read_schema(root.at("schema"));
  manifest.dtype = root.at("dtype").get<std::string>();
  manifest.device = root.at("device").get<std::string>();
  for (const Json& table : root.at("tables")) {
    manifest.table_bytes += table.at("bytes").get<std::uint64_t>();
  }
  manifest.bytes_packaged = root.at("bytes_packaged").get<std::uint64_t>();
  manifest.num_shards = root.at("plan").at("num_shards").get<int>();
  manifest.golden_atol = root.at("golden").at("atol").get<double>();
  manifest.golden_rtol = root.at("golden").at("rtol").get<double>();
  manifest.records = read_record_infos(root.at("records"));
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
