// A listening TCP socket.
//
// Contract: owns its descriptor; one thread.
#pragma once

#include <string>

namespace tessera {

class ListeningSocket {
 public:
  // Listens without blocking. Throws UsageError naming the address and `flag` (for the
  // remedy) when it cannot be had.
  ListeningSocket(const std::string& host, int port, const std::string& what,
                  const std::string& flag);
  ~ListeningSocket();
  ListeningSocket(const ListeningSocket&) = delete;
  ListeningSocket& operator=(const ListeningSocket&) = delete;

  int descriptor() const { return descriptor_; }

  // The port, which is another than the one asked for only where that was 0.
  int port() const;

 private:
  int descriptor_ = -1;
};

}  // namespace tessera
