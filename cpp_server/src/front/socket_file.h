// A Unix socket that listens at a path, for clients on the same machine. A message through one is
// copied in and out as through TCP, but without packets, acknowledgements and their interrupts.
//
// Who may write to the file may connect; the process's umask says who that is.
//
// Contract: owns its descriptor and the file; one thread.
#pragma once

#include <sys/types.h>

#include <string>

namespace tessera {

class SocketFile {
 public:
  // Listens without blocking. A file that a server has left behind, at which nobody listens, is
  // replaced. Throws UsageError naming `path` and `flag` when another file is there, or a program
  // that listens, or when there can be none.
  SocketFile(const std::string& path, const std::string& flag);
  // Removes the file, unless another has taken its place.
  ~SocketFile();
  SocketFile(const SocketFile&) = delete;
  SocketFile& operator=(const SocketFile&) = delete;

  int descriptor() const { return descriptor_; }

 private:
  const std::string path_;
  int descriptor_ = -1;
  dev_t device_ = 0;
  ino_t inode_ = 0;
};

}  // namespace tessera
