// Whether files have changed, by what the system says of them.
//
// A change is told once, when the files have stayed as they are from one look to the next: so a
// file that is being written, or two that belong together and change one after the other, are seen
// when they are whole.
//
// Contract: one thread at a time; a look asks the file system.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace tessera {

class FileWatch {
 public:
  explicit FileWatch(std::vector<std::string> paths);

  // Looks; whether the files are others than when this was last true, and as the look before saw
  // them.
  bool changed();

  // The files as they now are have been seen.
  void forget();

 private:
  // Device, inode, size and time of the last change in nanoseconds; all zero: there is no file.
  using Mark = std::array<std::int64_t, 4>;

  std::vector<Mark> marks() const;

  const std::vector<std::string> paths_;
  std::vector<Mark> known_;
  std::vector<Mark> last_;
};

}  // namespace tessera
