#include "front/socket.h"

#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>

#include "common/text.h"
#include "server/config.h"

namespace tessera {
namespace {

int listen_on(const addrinfo& address) {
  const int descriptor = ::socket(
      address.ai_family, address.ai_socktype | SOCK_NONBLOCK | SOCK_CLOEXEC, address.ai_protocol);
  if (descriptor < 0) return -1;
  const int on = 1;
  ::setsockopt(descriptor, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  if (::bind(descriptor, address.ai_addr, address.ai_addrlen) == 0 &&
      ::listen(descriptor, SOMAXCONN) == 0) {
    return descriptor;
  }
  const int reason = errno;
  ::close(descriptor);
  errno = reason;
  return -1;
}

void set_port(const addrinfo& address, int port) {
  const auto number = htons(static_cast<std::uint16_t>(port));
  if (address.ai_family == AF_INET6) {
    reinterpret_cast<sockaddr_in6*>(address.ai_addr)->sin6_port = number;
  } else {
    reinterpret_cast<sockaddr_in*>(address.ai_addr)->sin_port = number;
  }
}

using Addresses = std::unique_ptr<addrinfo, void (*)(addrinfo*)>;

// The addresses of `host`; none, and why in `reason`.
Addresses addresses_of(const std::string& host, int port, std::string& reason) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int failed = ::getaddrinfo(host.c_str(), text(port).c_str(), &hints, &found);
  if (failed != 0) reason = ::gai_strerror(failed);
  return {found, [](addrinfo* list) {
            if (list != nullptr) ::freeaddrinfo(list);
          }};
}

[[noreturn]] void refuse(const std::string& host, int port, const std::string& what,
                         const std::string& flag, const std::string& reason) {
  throw UsageError(text("the ", what, " address ", host, ":", port, " cannot be listened on (",
                        reason, "); choose another ", flag, " or --host"));
}

}  // namespace

ListeningSocket::ListeningSocket(const std::string& host, int port, const std::string& what,
                                 const std::string& flag) {
  std::string reason;
  const Addresses found = addresses_of(host, port, reason);
  for (const addrinfo* one = found.get(); one != nullptr && descriptor_ < 0; one = one->ai_next) {
    descriptor_ = listen_on(*one);
    if (descriptor_ < 0) reason = std::strerror(errno);
  }
  if (descriptor_ < 0) refuse(host, port, what, flag, reason);
}

ListeningSocket::ListeningSocket(ListeningSocket&& other) noexcept
    : descriptor_(std::exchange(other.descriptor_, -1)) {}

ListeningSocket::~ListeningSocket() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

std::vector<ListeningSocket> ListeningSocket::on_every_address(const std::string& host, int port,
                                                               const std::string& what,
                                                               const std::string& flag) {
  std::string reason;
  std::vector<ListeningSocket> sockets;
  // IPv6's wildcard takes IPv4's connections, too.
  for (const std::string& name : {host == "0.0.0.0" ? std::string("::") : host, host}) {
    const Addresses found = addresses_of(name, port, reason);
    for (addrinfo* one = found.get(); one != nullptr; one = one->ai_next) {
      if (port == 0 && !sockets.empty()) set_port(*one, sockets.front().port());
      const int descriptor = listen_on(*one);
      if (descriptor >= 0) {
        sockets.push_back(ListeningSocket(descriptor));
      } else {
        reason = std::strerror(errno);
      }
    }
    if (!sockets.empty()) return sockets;
  }
  refuse(host, port, what, flag, reason);
}

int ListeningSocket::port() const {
  sockaddr_storage address{};
  socklen_t length = sizeof(address);
  ::getsockname(descriptor_, reinterpret_cast<sockaddr*>(&address), &length);
  return address.ss_family == AF_INET6
             ? ntohs(reinterpret_cast<const sockaddr_in6*>(&address)->sin6_port)
             : ntohs(reinterpret_cast<const sockaddr_in*>(&address)->sin_port);
}

}  // namespace tessera
