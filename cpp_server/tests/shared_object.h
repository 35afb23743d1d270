// A POSIX shared memory object of a test's own.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstddef>
#include <stdexcept>
#include <string>
#include <string_view>

namespace tessera::test {

class SharedObject {
 public:
  explicit SharedObject(std::string_view content) {
    static int made = 0;
    key_ = "/tessera-test-" + std::to_string(::getpid()) + "-" + std::to_string(made++);
    descriptor_ = ::shm_open(key_.c_str(), O_RDWR | O_CREAT | O_EXCL, 0600);
    if (descriptor_ < 0 || ::write(descriptor_, content.data(), content.size()) !=
                               static_cast<ssize_t>(content.size())) {
      throw std::runtime_error("this system has no shared memory for tests");
    }
  }
  ~SharedObject() {
    unlink();
    ::close(descriptor_);
  }
  SharedObject(const SharedObject&) = delete;
  SharedObject& operator=(const SharedObject&) = delete;

  const std::string& key() const { return key_; }

  void resize(std::size_t bytes) {
    if (::ftruncate(descriptor_, static_cast<off_t>(bytes)) != 0) {
      throw std::runtime_error("ftruncate");
    }
  }

  void unlink() { ::shm_unlink(key_.c_str()); }

  std::string content() const {
    struct stat about {};
    ::fstat(descriptor_, &about);
    std::string read(static_cast<std::size_t>(about.st_size), '?');
    const ssize_t count = ::pread(descriptor_, read.data(), read.size(), 0);
    return count == about.st_size ? read : "not read";
  }

 private:
  std::string key_;
  int descriptor_ = -1;
};

}  // namespace tessera::test
