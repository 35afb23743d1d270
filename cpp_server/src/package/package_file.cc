#include "package/package_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "common/text.h"
#include "package/package_error.h"

namespace tessera {
namespace {

std::int64_t nanoseconds(const timespec& time) {
  return std::int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

std::int64_t modified_ns(const struct stat& status) { return nanoseconds(status.st_mtim); }

}  // namespace

PackageFile::PackageFile(std::string path) : path_(std::move(path)) {
  // O_NONBLOCK: opening a pipe by mistake must not wait for its writer.
  descriptor_ = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (descriptor_ < 0) {
    throw UnreadableError(path_, std::strerror(errno));
  }
  struct stat status {};
  const bool known = ::fstat(descriptor_, &status) == 0;
  if (!known || !S_ISREG(status.st_mode)) {
    ::close(descriptor_);
    throw PackageError(path_, "is not a file; give the MODEL.pt that package-model wrote");
  }
  size_ = static_cast<std::uint64_t>(status.st_size);
  modified_ns_ = modified_ns(status);
  changed_ns_ = nanoseconds(status.st_ctim);
  device_ = status.st_dev;
  inode_ = status.st_ino;
}

PackageFile::~PackageFile() { ::close(descriptor_); }

std::string PackageFile::identity() const {
  return text(device_, '/', inode_, '/', size_, '/', modified_ns_, '/', changed_ns_);
}

void PackageFile::read_at(std::uint64_t offset, std::span<std::byte> out) const {
  if (offset > size_ || out.size() > size_ - offset) {
    throw PackageError(path_, text("is damaged or cut short (", out.size(), " bytes at byte ",
                                   offset, " are beyond its ", size_, " bytes)"));
  }
  while (!out.empty()) {
    const ssize_t got = ::pread(descriptor_, out.data(), out.size(), static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) throw UnreadableError(path_, std::strerror(errno));
    if (got == 0) throw PackageError(path_, "was cut short while it was being read");
    offset += static_cast<std::uint64_t>(got);
    out = out.subspan(static_cast<std::size_t>(got));
  }
}

MappedFile PackageFile::mapped() const {
  void* const begin =
      ::mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_NORESERVE, descriptor_, 0);
  if (begin == MAP_FAILED) {
    throw PackageError(path_, text("cannot be mapped: ", std::strerror(errno)));
  }
  const std::shared_ptr<void> owner(begin,
                                    [size = size_](void* mapped) { ::munmap(mapped, size); });
  return {.content = {static_cast<std::byte*>(begin), size_}, .owner = owner};
}

}  // namespace tessera
