#include "http2/socket.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <memory>
#include <utility>

#include "common/text.h"

namespace tessera::http2 {
namespace {

bool would_block(int error) { return error == EAGAIN || error == EWOULDBLOCK; }

// Whether it speaks TCP.
bool prepare(int descriptor) {
  ::fcntl(descriptor, F_SETFL, ::fcntl(descriptor, F_GETFL) | O_NONBLOCK);
  const int on = 1;
  return ::setsockopt(descriptor, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on)) == 0;
}

}  // namespace

Socket::Socket(int descriptor) : descriptor_(descriptor), tcp_(prepare(descriptor)) {}

Socket::~Socket() {
  if (descriptor_ >= 0) ::close(descriptor_);
}

Socket::Socket(Socket&& other) noexcept
    : descriptor_(std::exchange(other.descriptor_, -1)),
      tcp_(other.tcp_),
      tls_(std::move(other.tls_)) {}

Socket& Socket::operator=(Socket&& other) noexcept {
  std::swap(descriptor_, other.descriptor_);
  std::swap(tcp_, other.tcp_);
  std::swap(tls_, other.tls_);
  return *this;
}

std::string Socket::connect(const std::string& host, int port) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int failed = ::getaddrinfo(host.c_str(), text(port).c_str(), &hints, &found);
  if (failed != 0) return ::gai_strerror(failed);
  const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(found, &::freeaddrinfo);
  std::string reason = "no address";
  for (const addrinfo* one = found; one != nullptr; one = one->ai_next) {
    const int made = ::socket(one->ai_family, one->ai_socktype | SOCK_CLOEXEC, one->ai_protocol);
    if (made >= 0 && ::connect(made, one->ai_addr, one->ai_addrlen) == 0) {
      *this = Socket(made);
      return "";
    }
    reason = std::strerror(errno);
    if (made >= 0) ::close(made);
  }
  return reason;
}

std::string Socket::peer_address() const {
  sockaddr_storage address{};
  socklen_t length = sizeof(address);
  if (::getpeername(descriptor_, reinterpret_cast<sockaddr*>(&address), &length) != 0) return "";
  const void* from = nullptr;
  int family = address.ss_family;
  if (family == AF_INET) {
    from = &reinterpret_cast<const sockaddr_in*>(&address)->sin_addr;
  } else if (family == AF_INET6) {
    const in6_addr& six = reinterpret_cast<const sockaddr_in6*>(&address)->sin6_addr;
    from = &six;
    if (IN6_IS_ADDR_V4MAPPED(&six) != 0) {
      constexpr std::size_t kMappedAt = 12;  // the last four of 16 bytes
      family = AF_INET;
      from = &six.s6_addr[kMappedAt];
    }
  }
  std::array<char, INET6_ADDRSTRLEN> written{};
  if (from == nullptr || ::inet_ntop(family, from, written.data(), written.size()) == nullptr) {
    return "";
  }
  return written.data();
}

std::uint32_t Socket::events(bool reads, bool writes) const {
  if (tls_ != nullptr) {
    // A handshake is waited for by reading, whatever there is to write behind it.
    const bool shaking_hands = tls_->shaking_hands();
    reads = reads || shaking_hands;
    writes = tls_->has_unsent() || (writes && !shaking_hands);
  }
  return (reads ? std::uint32_t{EPOLLIN} : 0U) | (writes ? std::uint32_t{EPOLLOUT} : 0U);
}

std::size_t Socket::waiting() const {
  int bytes = 0;
  if (tls_ != nullptr || !tcp_ || ::ioctl(descriptor_, FIONREAD, &bytes) != 0) return 0;
  return static_cast<std::size_t>(std::max(bytes, 0));
}

Moved Socket::read(std::span<std::byte> into) {
  if (tls_ != nullptr) return tls_->read(descriptor_, into);
  while (true) {
    const ssize_t got = ::recv(descriptor_, into.data(), into.size(), 0);
    if (got > 0) {
      const auto bytes = static_cast<std::size_t>(got);
      return {.bytes = bytes, .blocked = bytes < into.size()};
    }
    if (got == 0) return {.ended = true};
    if (errno == EINTR) continue;
    return {.blocked = would_block(errno), .ended = !would_block(errno)};
  }
}

Moved Socket::write(std::span<const std::byte> from) {
  if (tls_ != nullptr) return tls_->write(descriptor_, from);
  Moved moved;
  while (moved.bytes < from.size()) {
    const ssize_t sent =
        ::send(descriptor_, from.data() + moved.bytes, from.size() - moved.bytes, MSG_NOSIGNAL);
    if (sent >= 0) {
      moved.bytes += static_cast<std::size_t>(sent);
      continue;
    }
    if (errno == EINTR) continue;
    moved.blocked = would_block(errno);
    moved.ended = !moved.blocked;
    break;
  }
  return moved;
}

Moved Socket::write(std::span<const iovec> pieces) {
  Moved moved;
  if (tls_ != nullptr) {
    for (const iovec& piece : pieces) {
      const Moved now =
          tls_->write(descriptor_, {static_cast<const std::byte*>(piece.iov_base), piece.iov_len});
      moved.bytes += now.bytes;
      moved.blocked = now.blocked;
      moved.ended = now.ended;
      if (now.bytes < piece.iov_len) break;
    }
    return moved;
  }
  msghdr message{};
  message.msg_iov = const_cast<iovec*>(pieces.data());
  message.msg_iovlen = pieces.size();
  while (true) {
    const ssize_t sent = ::sendmsg(descriptor_, &message, MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent >= 0) {
      moved.bytes = static_cast<std::size_t>(sent);
      return moved;
    }
    moved.blocked = would_block(errno);
    moved.ended = !moved.blocked;
    return moved;
  }
}

void Socket::end_writing() {
  if (tls_ != nullptr) tls_->end_writing(descriptor_);
  ::shutdown(descriptor_, SHUT_WR);
}

}  // namespace tessera::http2
