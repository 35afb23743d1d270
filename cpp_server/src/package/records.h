// The package as an archive: which records it has and where their bytes are.
//
// Other readers of zip, torch's among them, see the same records in the file, because a package
// file has only one layout (layout.h): it is built again from the names, sizes and checksums that
// the directory gives, and a file that differs in one byte is refused.
//
// Contract: Records borrows its file, which must outlive it. Const methods may be called from
// several threads at once and block on the disk. Everything throws PackageError.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "package/layout.h"
#include "package/package_file.h"

namespace tessera {

class Records {
 public:
  // Reads the directory and every header; no record's content.
  explicit Records(const PackageFile& file, const ArchiveKind& kind = kPackageArchive);

  const PackageFile& file() const { return file_; }
  const ArchiveKind& kind() const { return kind_; }

  // By the name below the archive's top folder.
  const std::map<std::string, Record>& all() const { return records_; }

  bool has(const std::string& name) const { return records_.contains(name); }

  // The content of `name`, which must be there, have at most `max_bytes` bytes and the CRC-32
  // that the archive gives.
  std::vector<std::byte> read(const std::string& name, std::uint64_t max_bytes) const;

 private:
  const PackageFile& file_;
  const ArchiveKind& kind_;
  std::map<std::string, Record> records_;
};

}  // namespace tessera
