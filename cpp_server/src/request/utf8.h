// Whether text is well-formed UTF-8 (Unicode 15, table 3-7), which proto3 demands of strings.
#pragma once

#include <cstddef>
#include <string_view>

namespace tessera {

inline bool is_utf8(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  for (std::size_t i = 0; i < text.size();) {
    const unsigned char first = byte(i);
    std::size_t count = 0;  // continuation bytes
    unsigned char low = 0x80;
    unsigned char high = 0xbf;
    if (first < 0x80) {
      count = 0;
    } else if (first >= 0xc2 && first <= 0xdf) {
      count = 1;
    } else if (first >= 0xe0 && first <= 0xef) {
      count = 2;
      if (first == 0xe0) low = 0xa0;   // no overlong form
      if (first == 0xed) high = 0x9f;  // no surrogate
    } else if (first >= 0xf0 && first <= 0xf4) {
      count = 3;
      if (first == 0xf0) low = 0x90;
      if (first == 0xf4) high = 0x8f;  // nothing above U+10FFFF
    } else {
      return false;
    }
    if (text.size() - i <= count) return false;
    for (std::size_t k = 1; k <= count; ++k) {
      const unsigned char next = byte(i + k);
      if (next < low || next > high) return false;
      low = 0x80;
      high = 0xbf;
    }
    i += count + 1;
  }
  return true;
}

}  // namespace tessera
