#include "front/socket.h"

#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>

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

}  // namespace

ListeningSocket::ListeningSocket(const std::string& host, int port, const std::string& what,
                                 const std::string& flag) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int failed = ::getaddrinfo(host.c_str(), text(port).c_str(), &hints, &found);
  std::string reason = failed != 0 ? ::gai_strerror(failed) : "";
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(found, [](addrinfo* list) {
    if (list != nullptr) ::freeaddrinfo(list);
  });
  for (const addrinfo* one = found; one != nullptr && descriptor_ < 0; one = one->ai_next) {
    descriptor_ = listen_on(*one);
    if (descriptor_ < 0) reason = std::strerror(errno);
  }
  if (descriptor_ < 0) {
    throw UsageError(text("the ", what, " address ", host, ":", port, " cannot be listened on (",
                          reason, "); choose another ", flag, " or --host"));
  }
}

ListeningSocket::~ListeningSocket() { ::close(descriptor_); }

int ListeningSocket::port() const {
  sockaddr_storage address{};
  socklen_t length = sizeof(address);
  ::getsockname(descriptor_, reinterpret_cast<sockaddr*>(&address), &length);
  return address.ss_family == AF_INET6
             ? ntohs(reinterpret_cast<const sockaddr_in6*>(&address)->sin6_port)
             : ntohs(reinterpret_cast<const sockaddr_in*>(&address)->sin_port);
}

}  // namespace tessera
