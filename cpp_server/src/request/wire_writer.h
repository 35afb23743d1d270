// What the writers of messages share: how large fields are, and how they are written.
//
// Contract: WireWriter borrows memory that holds all that is written to it; it checks nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>

#include "request/wire_reader.h"

namespace tessera {

inline std::size_t varint_bytes(std::uint64_t value) {
  std::size_t count = 1;
  for (; value >= 0x80; value >>= 7) ++count;
  return count;
}

class WireWriter {
 public:
  explicit WireWriter(std::byte* out) : at_(out) {}

  void varint(std::uint64_t value) {
    for (; value >= 0x80; value >>= 7) *at_++ = static_cast<std::byte>(value | 0x80);
    *at_++ = static_cast<std::byte>(value);
  }

  void tag(std::uint32_t field, WireType type) {
    varint(std::uint64_t{field} << 3 | static_cast<std::uint64_t>(type));
  }

  void raw(const void* data, std::size_t bytes) {
    if (bytes > 0) std::memcpy(at_, data, bytes);
    at_ += bytes;
  }

 private:
  std::byte* at_;
};

inline std::size_t tag_bytes(std::uint32_t field) {
  return varint_bytes(std::uint64_t{field} << 3);
}

inline std::size_t delimited_bytes(std::uint32_t field, std::size_t content) {
  return tag_bytes(field) + varint_bytes(content) + content;
}

// proto3 leaves out fields that have their default.
inline std::size_t optional_bytes(std::uint32_t field, std::size_t content) {
  return content == 0 ? 0 : delimited_bytes(field, content);
}

inline void write_string(WireWriter& writer, std::uint32_t field, std::string_view value) {
  if (value.empty()) return;
  writer.tag(field, WireType::kBytes);
  writer.varint(value.size());
  writer.raw(value.data(), value.size());
}

}  // namespace tessera
