#include "front/connections.h"

#include <netinet/in.h>
#include <sys/socket.h>

#include <charconv>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

namespace tessera {
namespace {

constexpr Duration kPause = std::chrono::milliseconds(1);

int local_port(int descriptor) {
  sockaddr_storage address{};
  socklen_t length = sizeof(address);
  if (::getsockname(descriptor, reinterpret_cast<sockaddr*>(&address), &length) != 0) return -1;
  if (address.ss_family == AF_INET) {
    return ntohs(reinterpret_cast<const sockaddr_in*>(&address)->sin_port);
  }
  if (address.ss_family == AF_INET6) {
    return ntohs(reinterpret_cast<const sockaddr_in6*>(&address)->sin6_port);
  }
  return -1;
}

bool listens(int descriptor) {
  int value = 0;
  socklen_t length = sizeof(value);
  return ::getsockopt(descriptor, SOL_SOCKET, SO_ACCEPTCONN, &value, &length) == 0 && value != 0;
}

bool connected(int descriptor) {
  sockaddr_storage address{};
  socklen_t length = sizeof(address);
  return ::getpeername(descriptor, reinterpret_cast<sockaddr*>(&address), &length) == 0;
}

// The process's sockets on `port` for which `wanted` holds. A descriptor that is closed meanwhile
// is none of them any more.
std::vector<int> sockets(int port, bool (*wanted)(int)) {
  std::vector<int> found;
  std::error_code failed;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd", failed)) {
    const std::string name = entry.path().filename().string();
    int descriptor = -1;
    std::from_chars(name.data(), name.data() + name.size(), descriptor);
    if (local_port(descriptor) == port && wanted(descriptor)) found.push_back(descriptor);
  }
  return found;
}

}  // namespace

void end_connections(int port, TimePoint until) {
  for (const int descriptor : sockets(port, listens)) ::shutdown(descriptor, SHUT_RD);
  // Again and again: one may have been accepted just before.
  for (auto open = sockets(port, connected); !open.empty(); open = sockets(port, connected)) {
    for (const int descriptor : open) ::shutdown(descriptor, SHUT_RD);
    if (std::chrono::steady_clock::now() >= until) return;
    std::this_thread::sleep_for(kPause);
  }
}

}  // namespace tessera
