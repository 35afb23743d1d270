// The one layout that a package file has: from its records' names, sizes and checksums every
// header, every byte of padding and the whole directory follow (serving/FORMAT.md, "Every byte is
// determined").
//
// Contract: free functions without state; any thread; nothing blocks.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace tessera {

// The archive's top folder, and the record that lies behind all others.
inline constexpr std::string_view kTopFolder = "model/";
inline constexpr const char* kManifestRecord = "extra/tessera/manifest.json";

// Where one record's content lies in the file.
struct Record {
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
  std::uint32_t crc32 = 0;
};

// Whether a record may be called `name` (below the top folder).
bool good_name(std::string_view name);

// The bytes before the content of a record whose header begins at `header_offset`; `name` is
// that below the top folder.
std::string local_header(std::string_view name, const Record& record, std::uint64_t header_offset);

// The record's entry in the directory.
std::string directory_entry(std::string_view name, const Record& record,
                            std::uint64_t header_offset);

// What follows a directory of `bytes` bytes at `offset`.
std::string directory_end(std::uint64_t entries, std::uint64_t bytes, std::uint64_t offset);

}  // namespace tessera
