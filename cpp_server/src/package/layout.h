// The one layout that a package, or a commit of its log, has: from its records' names, sizes and
// checksums every header, every byte of padding and the whole directory follow (serving/FORMAT.md,
// "Every byte is determined").
//
// Contract: free functions without state; any thread; nothing blocks.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace tessera {

inline constexpr const char* kManifestRecord = "extra/tessera/manifest.json";
inline constexpr const char* kCommitRecord = "commit.json";

// What an archive is for.
struct ArchiveKind {
  std::string_view top_folder;  // that its records lie in, with the slash
  const char* last_record;      // the JSON that lists the others and lies behind them
  const char* last_word;        // what messages call it
  const char* advice;           // what to do where the file is of another layout
};

inline constexpr ArchiveKind kPackageArchive{
    "model/", kManifestRecord, "the manifest",
    "is damaged, cut short or no package at all (WHERE); if an older Tessera wrote it, package the "
    "model again"};
inline constexpr ArchiveKind kCommitArchive{"commit/", kCommitRecord, kCommitRecord,
                                            "is damaged, cut short or no commit at all (WHERE)"};

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
std::string local_header(std::string_view name, const Record& record, std::uint64_t header_offset,
                         std::string_view top_folder = kPackageArchive.top_folder);

// The record's entry in the directory.
std::string directory_entry(std::string_view name, const Record& record,
                            std::uint64_t header_offset,
                            std::string_view top_folder = kPackageArchive.top_folder);

// What follows a directory of `bytes` bytes at `offset`.
std::string directory_end(std::uint64_t entries, std::uint64_t bytes, std::uint64_t offset);

}  // namespace tessera
