// What `commit.json`, the last record of a commit's file, says: serving/FORMAT.md, "Commits".
//
// Contract: plain values and free functions; any thread; nothing blocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "package/manifest.h"

namespace tessera {

inline constexpr const char* kCommitGoldenRecord = "golden.bin";

// New bytes for one record of the package: row r is the record's bytes from offset + r * stride on,
// `width` of them.
struct PatchInfo {
  std::string record;  // "data/5"
  std::string table;   // whose rows they are; empty: no table's
  std::uint64_t offset = 0;
  std::uint64_t stride = 0;
  std::uint64_t width = 0;
  std::uint64_t count = 0;  // of rows
  std::string rows;         // the commit's record with their numbers; empty: 0, 1, ... count - 1
  std::string bytes;        // the commit's record with the new bytes
};

struct CommitInfo {
  std::string model;
  std::int64_t version = 0;
  std::int64_t number = 0;
  std::string base;
  std::string previous;
  std::optional<double> newest_example_s;  // since 1970
  std::vector<PatchInfo> patches;          // applied in their order
  double golden_atol = 0;
  double golden_rtol = 0;
  std::map<std::string, RecordInfo> records;  // every record but the last

  // Rows of tables that it changes.
  std::uint64_t rows() const;
};

// Reads commit.json as strictly as the manifest and checks what can be without the package. Throws
// std::invalid_argument.
CommitInfo parse_commit(std::span<const std::byte> json);

// Whether a patch, the `place`-th, lies within the package's record of `record_bytes` (nothing: the
// package has none), as far as that shows without its rows' numbers. Throws std::invalid_argument.
void check_patch_fits(const PatchInfo& patch, std::size_t place,
                      std::optional<std::uint64_t> record_bytes);

// Whether row numbers (uint32, little-endian, `patch.count` of them) ascend, and lie within a
// record of `record_bytes`. Throws std::invalid_argument.
void check_rows_fit(const PatchInfo& patch, std::size_t place, std::span<const std::byte> rows,
                    std::uint64_t record_bytes);

}  // namespace tessera
