// Small text helpers for messages that name the value they complain about.
#pragma once

#include <sstream>
#include <string>

namespace tessera {

// All parts, one after the other, as operator<< prints them.
template <typename... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream stream;
  (stream << ... << parts);
  return stream.str();
}

}  // namespace tessera
