// The address of a Unix socket at a path.
#pragma once

#include <sys/socket.h>
#include <sys/un.h>

#include <cstring>
#include <optional>
#include <string_view>

namespace tessera {

// Bytes of the longest path.
constexpr std::size_t kMostSocketPath = sizeof(sockaddr_un::sun_path) - 1;

// None: the path is empty, longer than kMostSocketPath, or has a NUL in it.
inline std::optional<sockaddr_un> unix_address(std::string_view path) {
  if (path.empty() || path.size() > kMostSocketPath || path.find('\0') != path.npos) return {};
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.data(), path.size());
  return address;
}

}  // namespace tessera
