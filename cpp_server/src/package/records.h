// The package as a plain zip archive: which records it has and where their bytes are.
//
// torch reads the same file with its own zip reader, so whatever would let two readers see
// different archives is refused: a name twice, bytes before the first or after the last
// record, several top folders, names that climb out of their folder, compressed, encrypted or
// overlapping records, a local header that contradicts the directory.
//
// Contract: Records borrows its file, which must outlive it. Const methods may be called from
// several threads at once and block on the disk. Everything throws PackageError.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "package/package_file.h"

namespace tessera {

// Where one record's content lies in the file.
struct Record {
  std::uint64_t offset = 0;
  std::uint64_t stored_bytes = 0;  // in the file
  std::uint64_t bytes = 0;         // of the content
  bool deflated = false;           // else the content is stored as it is
};

class Records {
 public:
  // Reads the directory and every local header; no record's content.
  explicit Records(const PackageFile& file);

  const PackageFile& file() const { return file_; }

  // By the name below the archive's top folder.
  const std::map<std::string, Record>& all() const { return records_; }

  bool has(const std::string& name) const { return records_.contains(name); }

  // Hands the content of `record` to `sink`, piece by piece.
  void stream(const Record& record,
              const std::function<void(std::span<const std::byte>)>& sink) const;

  // The content of `name`, which must be there and have at most `max_bytes` bytes.
  std::vector<std::byte> read(const std::string& name, std::uint64_t max_bytes) const;

 private:
  const PackageFile& file_;
  std::map<std::string, Record> records_;
};

}  // namespace tessera
