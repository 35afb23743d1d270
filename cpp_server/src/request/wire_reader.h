// The cursor under wire.cc's reader: tags, varints and length-delimited fields.
//
// Contract: borrows the bytes; a false return means that the message is malformed, and the
// cursor must not be used further.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

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

}  // namespace tessera
