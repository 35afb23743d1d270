// Commits for tests, written as serving/FORMAT.md says in words.
#pragma once

#include <zlib.h>

#include <cstdint>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "package/sha256.h"
#include "support.h"
#include "zip_writer.h"

namespace tessera::test {

template <typename T>
std::string raw(const std::vector<T>& numbers) {
  std::string bytes(numbers.size() * sizeof(T), '\0');
  if (!numbers.empty()) std::memcpy(bytes.data(), numbers.data(), bytes.size());
  return bytes;
}

inline std::string sha256_of(const std::string& content) {
  Sha256 digest;
  digest.update(as_bytes(content));
  return digest.hex();
}

// Golden answers of one sample without ids for support.h's schema.
inline std::string golden_file(float dense, float answer) {
  nlohmann::ordered_json header;
  std::string data;
  const auto add = [&](const char* name, const char* dtype, std::vector<int> shape,
                       const std::string& content) {
    header[name] = {{"dtype", dtype},
                    {"shape", shape},
                    {"data_offsets", {data.size(), data.size() + content.size()}}};
    data += content;
  };
  add("in.float_features", "F32", {1, 2}, raw<float>({dense, 0}));
  add("in.id_list_features_lengths", "I32", {3}, raw<std::int32_t>({0, 0, 0}));
  add("in.id_list_features_values", "I64", {0}, "");
  add("in.id_score_list_features_lengths", "I32", {1}, raw<std::int32_t>({0}));
  add("in.id_score_list_features_values", "I64", {0}, "");
  add("in.id_score_list_features_weights", "F32", {0}, "");
  add("out.default", "F32", {1}, raw<float>({answer}));
  const std::string head = header.dump();
  std::string out;
  put(out, head.size(), 8);
  return out + head + data;
}

// A patch of one record.
struct PatchSpec {
  std::string record = "data/0";
  std::uint64_t offset = 0;
  std::uint64_t stride = 4;
  std::uint64_t width = 4;
  std::vector<std::uint32_t> rows = {};  // empty: all from 0 on
  std::string bytes = "";
};

struct CommitSpec {
  std::string model = "m";
  std::int64_t version = 3;
  std::int64_t number = 1;
  std::string base = "";
  std::string previous = "";
  std::optional<double> newest_example_s = {};
  std::vector<PatchSpec> patches = {};
  std::string golden = "";
};

struct CommitBytes {
  std::string file;
  std::string sha256;  // of commit.json
};

inline CommitBytes commit_bytes(const CommitSpec& spec) {
  using Json = nlohmann::ordered_json;
  std::map<std::string, std::string> contents = {{"golden.bin", spec.golden}};
  Json patches = Json::array();
  for (std::size_t i = 0; i < spec.patches.size(); ++i) {
    const PatchSpec& patch = spec.patches[i];
    const std::string number = std::to_string(i);
    if (!patch.rows.empty()) contents["rows/" + number] = raw(patch.rows);
    contents["bytes/" + number] = patch.bytes;
    patches.push_back({{"record", patch.record},
                       {"table", "t"},
                       {"offset", patch.offset},
                       {"stride", patch.stride},
                       {"width", patch.width},
                       {"count", patch.bytes.size() / patch.width},
                       {"rows", patch.rows.empty() ? "" : "rows/" + number},
                       {"bytes", "bytes/" + number}});
  }
  Json records = Json::object();
  std::vector<ZipEntry> entries;
  for (const auto& [name, content] : contents) {
    const auto crc = ::crc32_z(0, reinterpret_cast<const Bytef*>(content.data()), content.size());
    records[name] = {{"sha256", sha256_of(content)},
                     {"bytes", content.size()},
                     {"crc32", crc},
                     {"chunks", Json::array()}};
    entries.push_back({"commit/" + name, content});
  }
  Json json{{"format_version", 1},
            {"model", spec.model},
            {"version", spec.version},
            {"number", spec.number},
            {"base", spec.base},
            {"previous", spec.previous},
            {"newest_example_s", nullptr},
            {"created_s", 1.5},
            {"step", nullptr},
            {"patches", patches},
            {"golden", {{"samples", 1}, {"atol", 1e-6}, {"rtol", 1e-6}}},
            {"records", records},
            {"signature", nullptr}};
  if (spec.newest_example_s.has_value()) json["newest_example_s"] = *spec.newest_example_s;
  const std::string text = json.dump(1) + "\n";
  entries.push_back({"commit/commit.json", text});
  return {zip(entries), sha256_of(text)};
}

}  // namespace tessera::test
