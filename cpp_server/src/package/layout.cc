#include "package/layout.h"

#include <algorithm>
#include <utility>

namespace tessera {
namespace {

// Names and numbers of fields: PKWARE's APPNOTE 6.3.
constexpr std::uint64_t kAlignment = 64;
constexpr std::uint64_t kMax16 = 0xffff;
constexpr std::uint64_t kMax32 = 0xffffffff;
constexpr std::uint64_t kVersion = 45;   // the first with zip64
constexpr std::uint64_t kDate = 0x0021;  // 1980-01-01, the earliest there is
constexpr std::uint64_t kZip64Id = 0x0001;
constexpr std::uint64_t kPaddingId = 0x4246;  // torch's own, "FB"
constexpr std::uint64_t kLocalBytes = 30;
constexpr std::uint64_t kFieldBytes = 4;  // id and length of an extra field
constexpr std::uint64_t kEnd64Bytes = 56;

// Appends little-endian numbers.
class Writer {
 public:
  Writer& put(std::uint64_t value, int bytes) {
    for (int i = 0; i < bytes; ++i) out_ += static_cast<char>(value >> (8 * i));
    return *this;
  }
  Writer& put2(std::uint64_t value) { return put(value, 2); }
  Writer& put4(std::uint64_t value) { return put(value, 4); }
  Writer& put8(std::uint64_t value) { return put(value, 8); }
  Writer& put(std::string_view text) {
    out_ += text;
    return *this;
  }
  std::string take() { return std::move(out_); }

 private:
  std::string out_;
};

std::uint64_t capped(std::uint64_t value, std::uint64_t most) { return std::min(value, most); }

// From the version needed to the sizes: the same in both headers.
void put_common(Writer& out, const Record& record) {
  out.put2(kVersion).put2(0).put2(0).put2(0).put2(kDate);
  out.put4(record.crc32).put4(capped(record.bytes, kMax32)).put4(capped(record.bytes, kMax32));
}

}  // namespace

bool good_name(std::string_view name) {
  for (std::size_t begin = 0; begin <= name.size();) {
    const std::size_t end = std::min(name.find('/', begin), name.size());
    const std::string_view part = name.substr(begin, end - begin);
    if (part.empty() || part == "." || part == "..") return false;
    begin = end + 1;
  }
  return std::all_of(name.begin(), name.end(),
                     [](char c) { return c >= 0x21 && c <= 0x7e && c != '\\'; });
}

std::string local_header(std::string_view name, const Record& record, std::uint64_t header_offset,
                         std::string_view top_folder) {
  Writer extra;
  const bool wide = record.bytes >= kMax32;
  if (wide) extra.put2(kZip64Id).put2(16).put8(record.bytes).put8(record.bytes);
  const std::uint64_t before = header_offset + kLocalBytes + top_folder.size() + name.size() +
                               (wide ? kFieldBytes + 16 : 0) + kFieldBytes;
  const std::uint64_t padding = (kAlignment - before % kAlignment) % kAlignment;
  extra.put2(kPaddingId).put2(padding).put(std::string(padding, '\0'));
  const std::string fields = extra.take();
  Writer out;
  out.put4(0x04034b50);
  put_common(out, record);
  out.put2(top_folder.size() + name.size())
      .put2(fields.size())
      .put(top_folder)
      .put(name)
      .put(fields);
  return out.take();
}

std::string directory_entry(std::string_view name, const Record& record,
                            std::uint64_t header_offset, std::string_view top_folder) {
  Writer extra;
  const bool wide = record.bytes >= kMax32;
  const bool far = header_offset >= kMax32;
  if (wide || far) {
    extra.put2(kZip64Id).put2((wide ? 16U : 0U) + (far ? 8U : 0U));
    if (wide) extra.put8(record.bytes).put8(record.bytes);
    if (far) extra.put8(header_offset);
  }
  const std::string fields = extra.take();
  Writer out;
  out.put4(0x02014b50).put2(kVersion);
  put_common(out, record);
  out.put2(top_folder.size() + name.size()).put2(fields.size()).put2(0).put2(0).put2(0).put4(0);
  out.put4(capped(header_offset, kMax32)).put(top_folder).put(name).put(fields);
  return out.take();
}

std::string directory_end(std::uint64_t entries, std::uint64_t bytes, std::uint64_t offset) {
  Writer out;
  if (entries >= kMax16 || bytes >= kMax32 || offset >= kMax32) {
    out.put4(0x06064b50).put8(kEnd64Bytes - 12).put2(kVersion).put2(kVersion).put4(0).put4(0);
    out.put8(entries).put8(entries).put8(bytes).put8(offset);
    out.put4(0x07064b50).put4(0).put8(offset + bytes).put4(1);
  }
  out.put4(0x06054b50).put2(0).put2(0);
  out.put2(capped(entries, kMax16)).put2(capped(entries, kMax16));
  out.put4(capped(bytes, kMax32)).put4(capped(offset, kMax32)).put2(0);
  return out.take();
}

}  // namespace tessera
