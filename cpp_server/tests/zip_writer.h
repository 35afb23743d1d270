// A zip archive in memory, for tests that damage it: every field can be written wrong.
#pragma once

#include <zlib.h>

#include <cstdint>
#include <fstream>
#include <string>
#include <vector>

namespace tessera::test {

struct ZipEntry {
  std::string name;
  std::string content;
  bool deflated = false;
  std::string local_name = {};  // empty: the same
  std::uint16_t flags = 0;
};

inline void put(std::string& out, std::uint64_t value, int bytes) {
  for (int i = 0; i < bytes; ++i) out += static_cast<char>(value >> (8 * i));
}

inline std::string deflated(const std::string& content) {
  z_stream stream{};
  deflateInit2(&stream, Z_BEST_SPEED, Z_DEFLATED, -MAX_WBITS, 8, Z_DEFAULT_STRATEGY);
  std::string out(deflateBound(&stream, content.size()), '\0');
  std::string in = content;
  stream.next_in = reinterpret_cast<Bytef*>(in.data());
  stream.avail_in = static_cast<uInt>(in.size());
  stream.next_out = reinterpret_cast<Bytef*>(out.data());
  stream.avail_out = static_cast<uInt>(out.size());
  deflate(&stream, Z_FINISH);
  out.resize(stream.total_out);
  deflateEnd(&stream);
  return out;
}

// `prefix` is written before the first record.
inline std::string zip(const std::vector<ZipEntry>& entries, const std::string& prefix = "") {
  std::string out = prefix;
  std::string directory;
  for (const ZipEntry& entry : entries) {
    const std::string stored = entry.deflated ? deflated(entry.content) : entry.content;
    const std::string& local = entry.local_name.empty() ? entry.name : entry.local_name;
    const std::uint64_t offset = out.size();
    const auto header = [&](std::string& to, bool in_directory) {
      put(to, in_directory ? 0x02014b50 : 0x04034b50, 4);
      if (in_directory) put(to, 20, 2);
      put(to, 20, 2);
      put(to, entry.flags, 2);
      put(to, entry.deflated ? 8 : 0, 2);
      put(to, 0, 4);  // time and date
      put(to, 0, 4);  // the checksum: SHA-256 is what counts
      put(to, stored.size(), 4);
      put(to, entry.content.size(), 4);
      put(to, in_directory ? entry.name.size() : local.size(), 2);
      put(to, 0, 2);
      if (!in_directory) return;
      put(to, 0, 2);  // comment
      put(to, 0, 2);  // disk
      put(to, 0, 2);
      put(to, 0, 4);  // attributes
      put(to, offset, 4);
    };
    header(out, false);
    out += local + stored;
    header(directory, true);
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
