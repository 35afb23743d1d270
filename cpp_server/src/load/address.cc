#include "load/address.h"

#include <netdb.h>

#include <cstring>
#include <memory>
#include <string_view>

#include "common/flags.h"
#include "common/unix_address.h"

namespace tessera {

Address resolve(const std::string& given, const std::string& flag) {
  const auto colon = given.rfind(':');
  std::string host = given.substr(0, colon);
  const bool in_brackets = host.starts_with('[') && host.ends_with(']');
  if (in_brackets) host = host.substr(1, host.size() - 2);
  const bool v6 = host.find(':') != std::string::npos;
  if (colon == std::string::npos || host.empty() || v6 != in_brackets) {
    refuse_flag(flag, "'" + given + "'", "give HOST:PORT, or [HOST]:PORT for IPv6");
  }
  const std::string port = given.substr(colon + 1);
  checked_number<int>(flag, port, 1, 65'535);
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int failed = ::getaddrinfo(host.c_str(), port.c_str(), &hints, &found);
  if (failed != 0) {
    refuse_flag(flag, "'" + given + "'",
                text("the host is not known (", ::gai_strerror(failed), "): give another"));
  }
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(found, &::freeaddrinfo);
  Address address{.text = given};
  address.length = found->ai_addrlen;
  std::memcpy(&address.bytes, found->ai_addr, found->ai_addrlen);
  return address;
}

Address resolve_grpc(const std::string& given) {
  constexpr std::string_view kUnix = "unix:";
  if (!given.starts_with(kUnix)) return resolve(given, "address");
  std::string_view path = std::string_view(given).substr(kUnix.size());
  if (path.starts_with("///")) path.remove_prefix(2);
  const auto found = unix_address(path);
  if (!found) {
    refuse_flag("address", "'" + given + "'",
                text("give a path of 1 to ", kMostSocketPath, " bytes"));
  }
  Address address{.text = "localhost", .length = sizeof(*found)};
  std::memcpy(&address.bytes, &*found, sizeof(*found));
  return address;
}

}  // namespace tessera
