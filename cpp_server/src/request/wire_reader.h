// The cursor under the readers of messages: tags, varints and length-delimited fields.
//
// Contract: borrows the bytes; a false return means that the message is malformed, and the
// cursor must not be used further.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>

#include "request/utf8.h"
#include "request/wire.h"

namespace tessera {

enum class WireType : std::uint32_t {
  kVarint = 0,
  kFixed64 = 1,
  kBytes = 2,
  kGroupBegin = 3,
  kGroupEnd = 4,
  kFixed32 = 5,
};

struct Tag {
  std::uint32_t field = 0;
  WireType type = WireType::kVarint;
};

class WireReader {
 public:
  explicit WireReader(Bytes bytes) : WireReader(bytes, 0) {}

  bool done() const { return at_ == end_; }

  bool tag(Tag& tag) {
    std::uint64_t value = 0;
    // 32 bits in at most five bytes. Of protobuf's parsers Python's refuses more bits and C++'s
    // drops them.
    const std::byte* const begin = at_;
    if (!varint(value) || at_ - begin > 5 || value > 0xffffffffU) return false;
    tag = {static_cast<std::uint32_t>(value >> 3), static_cast<WireType>(value & 7)};
    return tag.field != 0;
  }

  bool varint(std::uint64_t& value) {
    value = 0;
    for (unsigned shift = 0; shift < 70; shift += 7) {
      if (at_ == end_) return false;
      const auto byte = std::to_integer<std::uint64_t>(*at_++);
      if (shift < 64) value |= (byte & 0x7f) << shift;
      if (byte < 0x80) return true;
    }
    return false;
  }

  // The next `count` bytes.
  bool fixed(std::size_t count, Bytes& value) {
    if (static_cast<std::size_t>(end_ - at_) < count) return false;
    value = {at_, count};
    at_ += count;
    return true;
  }

  bool bytes(Bytes& value) {
    std::uint64_t count = 0;
    if (!varint(count) || count > static_cast<std::uint64_t>(end_ - at_)) return false;
    value = {at_, static_cast<std::size_t>(count)};
    at_ += count;
    return true;
  }

  // A reader of `message`, which was embedded in what this one reads.
  WireReader inside(Bytes message) const { return WireReader(message, depth_ + 1); }

  // Passes over a field that nobody asked for.
  bool skip(Tag tag) {
    constexpr int kMaxDepth = 100;  // protobuf's own limit of nesting
    std::uint64_t ignored = 0;
    Bytes ignored_bytes;
    switch (tag.type) {
      case WireType::kVarint: return varint(ignored);
      case WireType::kFixed64: return advance(8);
      case WireType::kBytes: return bytes(ignored_bytes);
      case WireType::kFixed32: return advance(4);
      case WireType::kGroupBegin: {
        if (depth_ == kMaxDepth) return false;
        ++depth_;
        Tag inner;
        while (this->tag(inner)) {
          if (inner.type == WireType::kGroupEnd) {
            --depth_;
            return inner.field == tag.field;
          }
          if (!skip(inner)) return false;
        }
        return false;
      }
      case WireType::kGroupEnd: return false;
    }
    return false;
  }

 private:
  WireReader(Bytes bytes, int depth)
      : at_(bytes.data()), end_(bytes.data() + bytes.size()), depth_(depth) {}

  bool advance(std::ptrdiff_t count) {
    if (end_ - at_ < count) return false;
    at_ += count;
    return true;
  }

  const std::byte* at_;
  const std::byte* end_;
  int depth_;  // of messages and groups around the cursor
};

inline bool read_int32(WireReader& reader, std::int32_t& value) {
  std::uint64_t wide = 0;
  if (!reader.varint(wide)) return false;
  value = static_cast<std::int32_t>(static_cast<std::uint32_t>(wide));
  return true;
}

inline bool read_string(WireReader& reader, std::string_view& value) {
  Bytes bytes;
  if (!reader.bytes(bytes)) return false;
  value = {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
  return is_utf8(value);
}

// Calls handle(reader, tag, handled) for every field and skips those that it leaves.
template <typename Handle>
bool read_fields(WireReader reader, const Handle& handle) {
  while (!reader.done()) {
    Tag tag;
    if (!reader.tag(tag)) return false;
    bool handled = true;
    if (!handle(reader, tag, handled)) return false;
    if (!handled && !reader.skip(tag)) return false;
  }
  return true;
}

inline bool is(Tag tag, std::uint32_t field, WireType type) {
  return tag.field == field && tag.type == type;
}

}  // namespace tessera
