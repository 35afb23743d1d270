#include "front/socket_file.h"

#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "common/text.h"
#include "common/unix_address.h"
#include "server/config.h"

namespace tessera {
namespace {

int unix_socket() { return ::socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0); }

int bind_to(int descriptor, const sockaddr_un& address) {
  return ::bind(descriptor, reinterpret_cast<const sockaddr*>(&address), sizeof(address));
}

// Why the file at `address` may not be replaced; empty: a server has left it behind.
std::string holder(const sockaddr_un& address) {
  struct stat found {};
  if (::lstat(address.sun_path, &found) != 0) return std::strerror(errno);
  if (!S_ISSOCK(found.st_mode)) return "a file is there that is not a socket";
  const int probe = unix_socket();
  if (probe < 0) return std::strerror(errno);
  const int connected =
      ::connect(probe, reinterpret_cast<const sockaddr*>(&address), sizeof(address));
  const int reason = connected == 0 ? 0 : errno;
  ::close(probe);
  if (reason == ECONNREFUSED) return "";
  // EAGAIN: its queue of new connections is full.
  return reason == 0 || reason == EAGAIN ? "another program listens there" : std::strerror(reason);
}

}  // namespace

SocketFile::SocketFile(const std::string& path, const std::string& flag) : path_(path) {
  const auto refuse = [&](const std::string& reason) {
    if (descriptor_ >= 0) ::close(descriptor_);
    throw UsageError(text("the Unix socket ", path, " cannot be listened on (", reason,
                          "); choose another ", flag));
  };
  const auto address = unix_address(path);
  if (!address) refuse(text("a path has 1 to ", kMostSocketPath, " bytes"));
  descriptor_ = unix_socket();
  if (descriptor_ < 0) refuse(std::strerror(errno));
  int bound = bind_to(descriptor_, *address);
  if (bound != 0 && errno == EADDRINUSE) {
    const std::string why = holder(*address);
    if (!why.empty()) refuse(why);
    ::unlink(path.c_str());
    bound = bind_to(descriptor_, *address);
  }
  if (bound != 0 || ::listen(descriptor_, SOMAXCONN) != 0) refuse(std::strerror(errno));
  struct stat made {};
  if (::lstat(path.c_str(), &made) != 0) refuse(std::strerror(errno));
  device_ = made.st_dev;
  inode_ = made.st_ino;
}

SocketFile::~SocketFile() {
  struct stat found {};
  if (::lstat(path_.c_str(), &found) == 0 && found.st_dev == device_ && found.st_ino == inode_) {
    ::unlink(path_.c_str());
  }
  ::close(descriptor_);
}

}  // namespace tessera
