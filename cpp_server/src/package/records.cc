#include "package/records.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <string_view>

#include "common/text.h"
#include "package/inflate.h"
#include "package/package_error.h"

namespace tessera {
namespace {

// Sizes and signatures: .ZIP File Format Specification (PKWARE APPNOTE 6.3).
constexpr std::uint32_t kEndSignature = 0x06054b50;
constexpr std::uint32_t kEnd64Signature = 0x06064b50;
constexpr std::uint32_t kLocator64Signature = 0x07064b50;
constexpr std::uint32_t kEntrySignature = 0x02014b50;
constexpr std::uint32_t kLocalSignature = 0x04034b50;
constexpr std::uint64_t kEndBytes = 22;
constexpr std::uint64_t kEnd64Bytes = 56;
constexpr std::uint64_t kLocator64Bytes = 20;
constexpr std::uint64_t kEntryBytes = 46;
constexpr std::uint64_t kLocalBytes = 30;
constexpr std::uint16_t kZip64ExtraId = 1;
constexpr std::uint16_t kFlagEncrypted = 1U << 0;
constexpr std::uint16_t kMethodStored = 0;
constexpr std::uint16_t kMethodDeflated = 8;
constexpr std::uint32_t kMax32 = 0xffffffffU;
constexpr std::uint16_t kMax16 = 0xffffU;
constexpr std::uint64_t kChunkBytes = 1ULL << 20;
constexpr std::uint64_t kMaxDirectoryBytes = 64ULL << 20;

// Little-endian fields of a byte range, with every access checked.
class Fields {
 public:
  Fields(std::span<const std::byte> bytes, const PackageFile& file) : bytes_(bytes), file_(file) {}

  template <typename T>
  T get(std::uint64_t offset) const {
    T value{};
    std::memcpy(&value, slice(offset, sizeof(T)).data(), sizeof(T));
    return value;
  }

  std::span<const std::byte> slice(std::uint64_t offset, std::uint64_t count) const {
    if (offset > bytes_.size() || count > bytes_.size() - offset) {
      throw PackageError(file_.path(), "is damaged: the archive's directory is cut short");
    }
    return bytes_.subspan(offset, count);
  }

  std::string string(std::uint64_t offset, std::uint64_t count) const {
    const auto part = slice(offset, count);
    return {reinterpret_cast<const char*>(part.data()), part.size()};
  }

 private:
  std::span<const std::byte> bytes_;
  const PackageFile& file_;
};

struct Directory {
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
  std::uint64_t entries = 0;
};

struct Entry {
  std::string name;
  Record record;
  std::uint64_t header_offset = 0;
  std::uint16_t method = 0;
};

[[noreturn]] void no_package(const PackageFile& file, std::string_view why) {
  throw PackageError(file.path(), text("is damaged, cut short or no package at all (", why, ")"));
}

Directory find_directory(const PackageFile& file) {
  if (file.size() < kEndBytes) no_package(file, "too short");
  std::array<std::byte, kEndBytes> end_bytes{};
  const std::uint64_t end_offset = file.size() - kEndBytes;
  file.read_at(end_offset, end_bytes);
  const Fields end(end_bytes, file);
  // The end record is the file's last bytes, so that every reader finds the same one.
  if (end.get<std::uint32_t>(0) != kEndSignature || end.get<std::uint16_t>(20) != 0) {
    no_package(file, "the archive's end record is not at the file's end");
  }
  Directory found{.offset = end.get<std::uint32_t>(16),
                  .bytes = end.get<std::uint32_t>(12),
                  .entries = end.get<std::uint16_t>(10)};
  std::uint64_t directory_end = end_offset;
  if (end_offset >= kLocator64Bytes + kEnd64Bytes) {
    std::array<std::byte, kLocator64Bytes> locator_bytes{};
    file.read_at(end_offset - kLocator64Bytes, locator_bytes);
    const Fields locator(locator_bytes, file);
    if (locator.get<std::uint32_t>(0) == kLocator64Signature) {
      const auto end64_offset = locator.get<std::uint64_t>(8);
      if (end64_offset != end_offset - kLocator64Bytes - kEnd64Bytes) {
        no_package(file, "its zip64 end record is not where it belongs");
      }
      std::array<std::byte, kEnd64Bytes> end64_bytes{};
      file.read_at(end64_offset, end64_bytes);
      const Fields end64(end64_bytes, file);
      if (end64.get<std::uint32_t>(0) != kEnd64Signature) no_package(file, "zip64 end record");
      // Where the short end record has the value, both must say the same.
      const Directory wide{.offset = end64.get<std::uint64_t>(48),
                           .bytes = end64.get<std::uint64_t>(40),
                           .entries = end64.get<std::uint64_t>(32)};
      if ((found.offset != kMax32 && found.offset != wide.offset) ||
          (found.bytes != kMax32 && found.bytes != wide.bytes) ||
          (found.entries != kMax16 && found.entries != wide.entries)) {
        no_package(file, "its two end records disagree");
      }
      found = wide;
      directory_end = end64_offset;
    }
  }
  if (found.offset > directory_end || found.bytes != directory_end - found.offset) {
    no_package(file, "the archive's directory is not where its end record says");
  }
  if (found.bytes > kMaxDirectoryBytes) no_package(file, "the archive's directory is too large");
  return found;
}

// Replaces the fields that are all ones by those of the zip64 extra field, in APPNOTE's order.
void apply_zip64(const Fields& extra, std::uint64_t extra_bytes, std::uint64_t& size,
                 std::uint64_t& stored, std::uint64_t& offset) {
  for (std::uint64_t at = 0; at + 4 <= extra_bytes;) {
    const auto id = extra.get<std::uint16_t>(at);
    const auto bytes = extra.get<std::uint16_t>(at + 2);
    if (id == kZip64ExtraId) {
      std::uint64_t field = at + 4;
      for (std::uint64_t* value : {&size, &stored, &offset}) {
        if (*value != kMax32) continue;
        *value = extra.get<std::uint64_t>(field);
        field += 8;
      }
      return;
    }
    at += 4 + std::uint64_t{bytes};
  }
}

void check_name(const PackageFile& file, const std::string& name) {
  bool good = name.find('\\') == std::string::npos && name.find('\0') == std::string::npos;
  std::size_t parts = 0;
  for (std::size_t begin = 0; good && begin <= name.size();) {
    const std::size_t end = std::min(name.find('/', begin), name.size());
    const std::string_view part(name.data() + begin, end - begin);
    good = !part.empty() && part != "." && part != "..";
    ++parts;
    begin = end + 1;
  }
  if (!good || parts < 2) {
    throw PackageError(file.path(), text("record '", name, "' has a name that no package uses"));
  }
}

// Reads one entry of the directory at `at` and moves `at` behind it.
Entry read_entry(const PackageFile& file, const Fields& directory, std::uint64_t& at) {
  if (directory.get<std::uint32_t>(at) != kEntrySignature) no_package(file, "directory entry");
  const auto flags = directory.get<std::uint16_t>(at + 8);
  const auto method = directory.get<std::uint16_t>(at + 10);
  std::uint64_t stored = directory.get<std::uint32_t>(at + 20);
  std::uint64_t size = directory.get<std::uint32_t>(at + 24);
  const auto name_bytes = directory.get<std::uint16_t>(at + 28);
  const auto extra_bytes = directory.get<std::uint16_t>(at + 30);
  const auto comment_bytes = directory.get<std::uint16_t>(at + 32);
  std::uint64_t offset = directory.get<std::uint32_t>(at + 42);
  Entry entry;
  entry.name = directory.string(at + kEntryBytes, name_bytes);
  const Fields extra(directory.slice(at + kEntryBytes + name_bytes, extra_bytes), file);
  apply_zip64(extra, extra_bytes, size, stored, offset);
  at += kEntryBytes + name_bytes + extra_bytes + comment_bytes;
  check_name(file, entry.name);
  const bool readable = method == kMethodDeflated || (method == kMethodStored && stored == size);
  if ((flags & kFlagEncrypted) != 0 || !readable) {
    throw PackageError(file.path(), text("record '", entry.name,
                                         "' is encrypted or compressed in a way that no package "
                                         "uses"));
  }
  entry.record.stored_bytes = stored;
  entry.record.bytes = size;
  entry.record.deflated = method == kMethodDeflated;
  entry.method = method;
  entry.header_offset = offset;
  return entry;
}

// Fills in where the content begins, from the local header before it.
void locate(const PackageFile& file, Entry& entry, std::uint64_t directory_offset) {
  std::array<std::byte, kLocalBytes> bytes{};
  file.read_at(entry.header_offset, bytes);
  const Fields local(bytes, file);
  const auto name_bytes = local.get<std::uint16_t>(26);
  const auto extra_bytes = local.get<std::uint16_t>(28);
  std::vector<std::byte> name(name_bytes);
  file.read_at(entry.header_offset + kLocalBytes, name);
  const std::string_view local_name(reinterpret_cast<const char*>(name.data()), name.size());
  if (local.get<std::uint32_t>(0) != kLocalSignature || local_name != entry.name ||
      local.get<std::uint16_t>(8) != entry.method) {
    throw PackageError(file.path(), text("record '", entry.name,
                                         "' is damaged: its local header contradicts the "
                                         "archive's directory"));
  }
  entry.record.offset = entry.header_offset + kLocalBytes + name_bytes + extra_bytes;
  if (entry.record.offset > directory_offset ||
      entry.record.stored_bytes > directory_offset - entry.record.offset) {
    throw PackageError(file.path(), text("record '", entry.name, "' is cut short"));
  }
}

}  // namespace

Records::Records(const PackageFile& file) : file_(file) {
  const Directory directory = find_directory(file);
  std::vector<std::byte> bytes(directory.bytes);
  file.read_at(directory.offset, bytes);
  const Fields fields(bytes, file);
  std::vector<Entry> entries;
  std::uint64_t at = 0;
  for (std::uint64_t i = 0; i < directory.entries; ++i) {
    entries.push_back(read_entry(file, fields, at));
    locate(file, entries.back(), directory.offset);
  }
  if (at != directory.bytes) no_package(file, "its directory has bytes of no record");
  std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) {
    return a.header_offset < b.header_offset;
  });
  if (entries.empty() || entries.front().header_offset != 0) {
    throw PackageError(file.path(), "the archive does not begin at the file's first byte");
  }
  const std::string top = entries.front().name.substr(0, entries.front().name.find('/') + 1);
  std::uint64_t free_from = 0;
  for (const Entry& entry : entries) {
    if (entry.header_offset < free_from) {
      throw PackageError(file.path(), text("record '", entry.name, "' overlaps another"));
    }
    free_from = entry.record.offset + entry.record.stored_bytes;
    if (!entry.name.starts_with(top)) {
      throw PackageError(file.path(),
                         text("record '", entry.name, "' has a name that no package uses"));
    }
    const std::string name = entry.name.substr(top.size());
    if (!records_.emplace(name, entry.record).second) {
      throw PackageError(file.path(), text("record '", name, "' is there twice"));
    }
  }
}

void Records::stream(const Record& record,
                     const std::function<void(std::span<const std::byte>)>& sink) const {
  if (record.deflated) {
    inflate_range(file_, record.offset, record.stored_bytes, record.bytes, sink);
    return;
  }
  std::vector<std::byte> chunk(std::min(record.bytes, kChunkBytes));
  for (std::uint64_t done = 0; done < record.bytes;) {
    const std::span part(chunk.data(), std::min<std::uint64_t>(record.bytes - done, chunk.size()));
    file_.read_at(record.offset + done, part);
    sink(part);
    done += part.size();
  }
}

std::vector<std::byte> Records::read(const std::string& name, std::uint64_t max_bytes) const {
  const auto found = records_.find(name);
  if (found == records_.end()) {
    throw PackageError(file_.path(), text("record '", name, "' is missing"));
  }
  const Record& record = found->second;
  if (record.bytes > max_bytes) {
    throw PackageError(file_.path(), text("record '", name, "' has ", record.bytes,
                                          " bytes, more than ", max_bytes));
  }
  std::vector<std::byte> content;
  content.reserve(record.bytes);
  stream(record, [&](std::span<const std::byte> piece) {
    content.insert(content.end(), piece.begin(), piece.end());
  });
  return content;
}

}  // namespace tessera
