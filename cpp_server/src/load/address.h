// HOST:PORT, resolved once.
//
// Contract: plain values; resolving blocks.
#pragma once

#include <sys/socket.h>

#include <string>

namespace tessera {

struct Address {
  std::string text;  // as it was given, for the :authority of requests
  sockaddr_storage bytes{};
  socklen_t length = 0;
};

// `given` is HOST:PORT, with an IPv6 host in brackets. Throws UsageError, which names the flag.
Address resolve(const std::string& given, const std::string& flag = "address");

}  // namespace tessera
