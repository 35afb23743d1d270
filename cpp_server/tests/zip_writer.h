// A package's archive in memory, written as serving/FORMAT.md says in words, for tests that damage
// it. Sizes stay below what zip64 is for.
#pragma once

#include <zlib.h>

#include <cstdint>
#include <fstream>
#include <string>
#include <vector>

namespace tessera::test {

struct ZipEntry {
  std::string name;  // with the top folder
  std::string content;
};

inline void put(std::string& out, std::uint64_t value, int bytes) {
  for (int i = 0; i < bytes; ++i) out += static_cast<char>(value >> (8 * i));
}

inline std::string zip(const std::vector<ZipEntry>& entries) {
  std::string out;
  std::string directory;
  for (const ZipEntry& entry : entries) {
    const std::uint64_t offset = out.size();
    const auto checksum =
        ::crc32_z(0, reinterpret_cast<const Bytef*>(entry.content.data()), entry.content.size());
    const auto common = [&](std::string& to) {
      put(to, 45, 2);      // version needed
      put(to, 0, 2 + 2);   // flags, method
      put(to, 0, 2);       // time
      put(to, 0x0021, 2);  // date
      put(to, checksum, 4);
      put(to, entry.content.size(), 4);
      put(to, entry.content.size(), 4);
      put(to, entry.name.size(), 2);
    };
    put(out, 0x04034b50, 4);
    common(out);
    const std::uint64_t padding = (64 - (offset + 30 + entry.name.size() + 4) % 64) % 64;
    put(out, 4 + padding, 2);
    out += entry.name;
    put(out, 0x4246, 2);
    put(out, padding, 2);
    out += std::string(padding, '\0') + entry.content;
    put(directory, 0x02014b50, 4);
    put(directory, 45, 2);  // made by
    common(directory);
    put(directory, 0, 2 + 2 + 2 + 2);  // extra field, comment, disk, attributes
    put(directory, 0, 4);
    put(directory, offset, 4);
    directory += entry.name;
  }
  const std::uint64_t directory_offset = out.size();
  out += directory;
  put(out, 0x06054b50, 4);
  put(out, 0, 4);
  put(out, entries.size(), 2);
  put(out, entries.size(), 2);
  put(out, directory.size(), 4);
  put(out, directory_offset, 4);
  put(out, 0, 2);
  return out;
}

inline std::string write_file(const std::string& path, const std::string& content) {
  std::ofstream(path, std::ios::binary) << content;
  return path;
}

}  // namespace tessera::test
