// The one error of opening a package: which file, and why it is not served.
#pragma once

#include <stdexcept>
#include <string>

namespace tessera {

// what() reads "package PATH: REASON", one line, for the operator to act on.
class PackageError : public std::runtime_error {
 public:
  PackageError(const std::string& path, const std::string& reason)
      : std::runtime_error("package " + path + ": " + reason), reason_(reason) {}

  // What what() says behind the path.
  const std::string& reason() const { return reason_; }

 private:
  std::string reason_;
};

// The system could not give the file's bytes (no descriptor was left, a disk failed): this says
// nothing about them, and another try may find them good.
class UnreadableError final : public PackageError {
 public:
  UnreadableError(const std::string& path, const std::string& why)
      : PackageError(path, "cannot be read: " + why) {}
};

}  // namespace tessera
