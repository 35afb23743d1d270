#include "repository/small_file.h"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "common/flags.h"
#include "common/text.h"

namespace tessera {
namespace {

class Descriptor {
 public:
  explicit Descriptor(int number) : number_(number) {}
  ~Descriptor() {
    if (number_ >= 0) ::close(number_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int number() const { return number_; }

 private:
  const int number_;
};

[[noreturn]] void refuse(const std::string& path, const std::string& what) {
  throw UsageError(text(path, ": ", what, " (", std::strerror(errno), ")"));
}

bool write_all(int file, std::string_view content) {
  while (!content.empty()) {
    const ssize_t wrote = ::write(file, content.data(), content.size());
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote < 0) return false;
    content.remove_prefix(static_cast<std::size_t>(wrote));
  }
  return true;
}

// Writes `content` to a new file, whose name it returns.
std::string write_beside(const std::string& folder, std::string_view content) {
  // Whoever scans the folder passes over names that begin with a dot.
  std::string name = folder + "/.writing-XXXXXX";
  const Descriptor file(::mkostemp(name.data(), O_CLOEXEC));
  if (file.number() < 0) refuse(folder, "cannot be written");
  constexpr mode_t kReadable = 0644;
  if (write_all(file.number(), content) && ::fchmod(file.number(), kReadable) == 0 &&
      ::fsync(file.number()) == 0) {
    return name;
  }
  const int reason = errno;
  ::unlink(name.c_str());
  errno = reason;
  refuse(folder, "cannot be written");
}

}  // namespace

std::optional<std::string> read_small_file(const std::string& path, std::size_t max_bytes) {
  // O_NONBLOCK: opening a pipe would wait for its other end.
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (file.number() < 0) {
    if (errno == ENOENT) return std::nullopt;
    refuse(path, "cannot be read");
  }
  struct stat about {};
  if (::fstat(file.number(), &about) != 0) refuse(path, "cannot be read");
  if (!S_ISREG(about.st_mode))
    throw UsageError(path + ": is not a regular file; put one in its place or remove it");
  // One byte more than it has shows its end; a file that grows meanwhile gets more room.
  std::string content(std::min(static_cast<std::size_t>(about.st_size), max_bytes) + 1, '\0');
  std::size_t have = 0;
  while (have <= max_bytes) {
    if (have == content.size()) content.resize(std::min(2 * have, max_bytes + 1));
    const ssize_t got = ::read(file.number(), content.data() + have, content.size() - have);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) refuse(path, "cannot be read");
    if (got == 0) break;
    have += static_cast<std::size_t>(got);
  }
  if (have > max_bytes) {
    throw UsageError(
        text(path, ": has more than ", max_bytes, " bytes, the limit; make it shorter"));
  }
  content.resize(have);
  return content;
}

void replace_file(const std::string& path, std::string_view content) {
  const std::string folder = path.substr(0, path.rfind('/'));
  const std::string written = write_beside(folder, content);
  if (::rename(written.c_str(), path.c_str()) != 0) {
    const int reason = errno;
    ::unlink(written.c_str());
    errno = reason;
    refuse(path, "cannot be written");
  }
  // The new name is on the disk once its folder is. Where that fails the file is in its place all
  // the same, for as long as the power lasts.
  const Descriptor named(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (named.number() < 0 || ::fsync(named.number()) != 0) refuse(path, "cannot be synchronised");
}

}  // namespace tessera
