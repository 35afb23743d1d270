#include "package/records.h"

#include <zlib.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "common/text.h"
#include "package/format_rules.h"
#include "package/package_error.h"

namespace tessera {
namespace {

// Signatures, sizes and places of fields: PKWARE's APPNOTE 6.3.
constexpr std::uint32_t kEndSignature = 0x06054b50;
constexpr std::uint32_t kEnd64Signature = 0x06064b50;
constexpr std::uint64_t kEndBytes = 22;
constexpr std::uint64_t kEnd64Bytes = 56;
constexpr std::uint64_t kLocator64Bytes = 20;
constexpr std::uint64_t kEntryBytes = 46;
constexpr std::uint64_t kFieldBytes = 4;
constexpr std::uint32_t kMax32 = 0xffffffffU;

// What is read of an archive, with what it is for.
struct Source {
  const PackageFile& file;
  const ArchiveKind& kind;
};

[[noreturn]] void no_package(const Source& source, std::string_view why) {
  std::string said(source.kind.advice);
  constexpr std::string_view kWhere = "WHERE";
  said.replace(said.find(kWhere), kWhere.size(), why);
  throw PackageError(source.file.path(), said);
}

// `name` as one line of ASCII, whatever bytes it has.
std::string printable(std::string_view name) {
  std::string shown(name);
  std::replace_if(
      shown.begin(), shown.end(), [](char c) { return c < ' ' || c > '~'; }, '?');
  return shown;
}

// A range of the file in memory, with every access checked.
class Fields {
 public:
  Fields(const Source& source, std::uint64_t offset, std::uint64_t bytes)
      : source_(source), bytes_(bytes) {
    source.file.read_at(offset, bytes_);
  }

  template <typename T>
  T get(std::uint64_t at) const {
    T value{};
    std::memcpy(&value, slice(at, sizeof(T)).data(), sizeof(T));
    return value;
  }

  std::string_view slice(std::uint64_t at, std::uint64_t count) const {
    if (at > bytes_.size() || count > bytes_.size() - at) no_package(source_, "its directory");
    return {reinterpret_cast<const char*>(bytes_.data()) + at, count};
  }

 private:
  const Source source_;
  std::vector<std::byte> bytes_;
};

struct Directory {
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
};

// Where the end records say that the directory is; whether they say the truth shows when
// everything is built again.
Directory find_directory(const Source& source) {
  const PackageFile& file = source.file;
  if (file.size() < kEndBytes) no_package(source, "it is too short");
  const std::uint64_t end_offset = file.size() - kEndBytes;
  const Fields end(source, end_offset, kEndBytes);
  if (end.get<std::uint32_t>(0) != kEndSignature) {
    no_package(source, "the archive's end record is not at the file's end");
  }
  Directory found{.offset = end.get<std::uint32_t>(16), .bytes = end.get<std::uint32_t>(12)};
  constexpr std::uint64_t kWideBytes = kEnd64Bytes + kLocator64Bytes;
  if (end_offset >= kWideBytes) {
    const Fields wide(source, end_offset - kWideBytes, kWideBytes);
    // In a package without these records the bytes are those of the directory's last entry.
    if (wide.get<std::uint32_t>(0) == kEnd64Signature) {
      found = {.offset = wide.get<std::uint64_t>(48), .bytes = wide.get<std::uint64_t>(40)};
    }
  }
  if (found.offset > file.size() || found.bytes > file.size() - found.offset) {
    no_package(source, "its directory is not where its end says");
  }
  if (found.bytes > kMaxDirectoryBytes) no_package(source, "its directory is too large");
  return found;
}

struct Entry {
  std::string name;  // below the top folder
  Record record;
  std::uint64_t header_offset = 0;
};

// Reads the entry at `at` and moves `at` behind it.
Entry read_entry(const Source& source, const Fields& directory, std::uint64_t& at) {
  const auto name_bytes = directory.get<std::uint16_t>(at + 28);
  const auto extra_bytes = directory.get<std::uint16_t>(at + 30);
  const std::string_view name = directory.slice(at + kEntryBytes, name_bytes);
  if (!name.starts_with(source.kind.top_folder) ||
      !good_name(name.substr(source.kind.top_folder.size()))) {
    no_package(source, text("record '", printable(name), "' has a name that no package uses"));
  }
  Entry entry;
  entry.name = name.substr(source.kind.top_folder.size());
  entry.record.crc32 = directory.get<std::uint32_t>(at + 16);
  entry.record.bytes = directory.get<std::uint32_t>(at + 24);
  entry.header_offset = directory.get<std::uint32_t>(at + 42);
  std::uint64_t field = at + kEntryBytes + name_bytes + kFieldBytes;
  if (entry.record.bytes == kMax32) {
    entry.record.bytes = directory.get<std::uint64_t>(field);
    field += 16;
  }
  if (entry.header_offset == kMax32) entry.header_offset = directory.get<std::uint64_t>(field);
  at += kEntryBytes + name_bytes + extra_bytes;
  return entry;
}

void compare(const Source& source, std::uint64_t offset, const std::string& expected,
             std::string_view what) {
  const PackageFile& file = source.file;
  std::vector<std::byte> found(expected.size());
  if (offset > file.size() || expected.size() > file.size() - offset) no_package(source, what);
  file.read_at(offset, found);
  if (std::memcmp(found.data(), expected.data(), found.size()) != 0) no_package(source, what);
}

// `last` is behind all others, which are in the order of their names.
bool in_order(const std::string& name, const std::string& next, const char* last) {
  if (name == last) return false;
  return next == last || name < next;
}

}  // namespace

Records::Records(const PackageFile& file, const ArchiveKind& kind) : file_(file), kind_(kind) {
  const Source source{file, kind};
  const Directory place = find_directory(source);
  const Fields directory(source, place.offset, place.bytes);
  std::uint64_t offset = 0;  // where the next record begins
  std::string rebuilt;
  std::string last;
  for (std::uint64_t at = 0; at < place.bytes;) {
    Entry entry = read_entry(source, directory, at);
    const std::string what = text("the header of record '", entry.name, "'");
    if (!last.empty() && !in_order(last, entry.name, kind.last_record)) {
      no_package(source, text("record '", entry.name, "' is not in the order of names"));
    }
    const std::string header = local_header(entry.name, entry.record, offset, kind.top_folder);
    compare(source, offset, header, what);
    rebuilt += directory_entry(entry.name, entry.record, offset, kind.top_folder);
    entry.record.offset = offset + header.size();
    if (entry.record.bytes > place.offset ||
        entry.record.offset > place.offset - entry.record.bytes) {
      no_package(source, text("record '", entry.name, "' is cut short"));
    }
    offset = entry.record.offset + entry.record.bytes;
    last = entry.name;
    records_.emplace(entry.name, entry.record);
  }
  if (offset != place.offset) no_package(source, "there are bytes that belong to no record");
  rebuilt += directory_end(records_.size(), place.bytes, place.offset);
  compare(source, offset, rebuilt, "its directory");
  if (offset + rebuilt.size() != file.size()) no_package(source, "its end");
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
  std::vector<std::byte> content(record.bytes);
  file_.read_at(record.offset, content);
  const auto checksum =
      ::crc32_z(0, reinterpret_cast<const Bytef*>(content.data()), content.size());
  if (checksum != record.crc32) {
    throw PackageError(file_.path(),
                       text("record '", name, "' is damaged: its CRC-32 does not hold"));
  }
  return content;
}

}  // namespace tessera
