// A package's bytes: one open file that every later step reads, so that all of them (hashing,
// the manifest, torch) see the same file even when its path is replaced meanwhile.
//
// Contract: owns the descriptor. read_at may be called from several threads at once; it
// blocks on the disk. Everything throws PackageError.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

namespace tessera {

// A file's bytes in memory, as long as somebody owns them. What is written there does not reach the
// file; a file that is cut short meanwhile ends the process that looks.
struct MappedFile {
  std::span<std::byte> content;
  std::shared_ptr<const void> owner;
};

class PackageFile {
 public:
  // Opens `path`, which must be a regular file.
  explicit PackageFile(std::string path);
  ~PackageFile();
  PackageFile(const PackageFile&) = delete;
  PackageFile& operator=(const PackageFile&) = delete;

  const std::string& path() const { return path_; }
  std::uint64_t size() const { return size_; }
  int descriptor() const { return descriptor_; }
  // Another one for each file, and for each time that a file was written to, as far as the file
  // system tells.
  std::string identity() const;

  // Fills `out` from byte `offset`; the range must lie within the file.
  void read_at(std::uint64_t offset, std::span<std::byte> out) const;

  // All of it; pages are read when they are looked at.
  MappedFile mapped() const;

 private:
  std::string path_;
  int descriptor_ = -1;
  std::uint64_t size_ = 0;
  std::int64_t modified_ns_ = 0;
  std::int64_t changed_ns_ = 0;  // its contents or what the file system says of it
  std::uint64_t device_ = 0;
  std::uint64_t inode_ = 0;
};

}  // namespace tessera
