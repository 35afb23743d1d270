// What `tessera/manifest.json` inside a package says, as far as a server needs it.
// serving/FORMAT.md describes the whole.
//
// Contract: plain values, never changed once read.
#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json_fwd.hpp>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "package/format_rules.h"
#include "package/layout.h"
#include "package/records.h"
#include "package/schema.h"

namespace tessera {

inline constexpr const char* kGoldenRecord = "extra/tessera/golden.bin";

// A torch release without its patch level.
using MajorMinor = std::pair<int, int>;

// Contents larger than this have a hash for every so many bytes beside that of the whole, so that
// several threads can check one.
inline constexpr std::uint64_t kChunkBytes = 8U << 20;

// How many chunks a content of `bytes` has; none where it is no larger than one.
constexpr std::uint64_t chunk_count(std::uint64_t bytes) {
  return bytes <= kChunkBytes ? 0 : (bytes - 1) / kChunkBytes + 1;
}

struct RecordInfo {
  std::string sha256;  // lower-case hex
  std::uint64_t bytes = 0;
  std::uint32_t crc32 = 0;
  std::vector<std::string> chunks = {};  // SHA-256 of each chunk, lower-case hex
};

struct Manifest {
  std::string name;
  std::string version;
  std::string created;
  std::string tessera_version;
  std::string torch_version;
  MajorMinor torch_min;    // the oldest torch that may load the package
  MajorMinor torch_below;  // the first that may not
  std::vector<std::string> operator_libraries;
  InputSchema schema;
  std::string dtype;
  std::string device;
  std::uint64_t table_bytes = 0;     // of all tables, as stored
  std::uint64_t bytes_packaged = 0;  // of all weights
  int num_shards = 1;
  double golden_atol = 0;
  double golden_rtol = 0;
  std::map<std::string, RecordInfo> records;  // every record but the manifest
};

// "2.13.0+cpu" -> {2, 13}. Throws std::invalid_argument on anything else.
MajorMinor major_minor(const std::string& version);

// Reads the manifest's JSON strictly: a key that is missing, unknown or there twice, or a value
// of the wrong type, throws std::invalid_argument naming it. So does a signature that is not
// spelled as packages have it; whether it holds is not looked at.
Manifest parse_manifest(std::span<const std::byte> json);

// The field `records` of a manifest or a commit, whose rules it has passed.
std::map<std::string, RecordInfo> read_record_infos(const nlohmann::json& records);

// The manifest's bytes. Throws PackageError.
std::vector<std::byte> read_manifest_bytes(const Records& records);

// Reads the manifest of an archive. Throws PackageError.
Manifest read_manifest(const Records& records);

// The same from what read_manifest_bytes gave.
Manifest read_manifest(const Records& records, std::span<const std::byte> content);

}  // namespace tessera
