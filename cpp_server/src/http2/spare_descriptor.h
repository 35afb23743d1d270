// A descriptor that is kept so that there is one where the system has no other. One thread's.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <utility>

namespace tessera::http2 {

class SpareDescriptor {
 public:
  SpareDescriptor() { take(); }
  ~SpareDescriptor() { give(); }
  SpareDescriptor(const SpareDescriptor&) = delete;
  SpareDescriptor& operator=(const SpareDescriptor&) = delete;

  void take() {
    if (descriptor_ < 0) descriptor_ = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
  }
  // False: it could not be taken again since it was given last.
  bool give() {
    if (descriptor_ < 0) return false;
    ::close(std::exchange(descriptor_, -1));
    return true;
  }

 private:
  int descriptor_ = -1;
};

}  // namespace tessera::http2
