// A listening TCP socket.
//
// Contract: owns its descriptor; one thread.
#pragma once

#include <string>
#include <vector>

struct addrinfo;

namespace tessera {

class ListeningSocket {
 public:
  // Listens without blocking. Throws UsageError naming the address and `flag` (for the
  // remedy) when it cannot be had.
  ListeningSocket(const std::string& host, int port, const std::string& what,
                  const std::string& flag);
  ~ListeningSocket();
  ListeningSocket(ListeningSocket&& other) noexcept;
  ListeningSocket(const ListeningSocket&) = delete;
  ListeningSocket& operator=(const ListeningSocket&) = delete;

  // The same on every address that `host` stands for: 0.0.0.0 is every interface, of IPv6 too where
  // the system has it. Throws when there is none that can be had.
  static std::vector<ListeningSocket> on_every_address(const std::string& host, int port,
                                                       const std::string& what,
                                                       const std::string& flag);

  int descriptor() const { return descriptor_; }

  // The port, which is another than the one asked for only where that was 0.
  int port() const;

 private:
  explicit ListeningSocket(int descriptor) : descriptor_(descriptor) {}

  int descriptor_ = -1;
};

}  // namespace tessera
