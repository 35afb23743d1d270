// Where a server is: HOST:PORT, resolved once, or unix:PATH.
//
// Contract: plain values; resolving blocks.
#pragma once

#include <sys/socket.h>

#include <string>

namespace tessera {

struct Address {
  std::string text;  // as it was given, for the :authority of requests; localhost for a path
  sockaddr_storage bytes{};
  socklen_t length = 0;
};

// `given` is HOST:PORT, with an IPv6 host in brackets. Throws UsageError, which names the flag.
Address resolve(const std::string& given, const std::string& flag);

// The same for --address, which may be unix:PATH as gRPC writes it, too.
Address resolve_grpc(const std::string& given);

}  // namespace tessera
