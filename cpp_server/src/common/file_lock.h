// A lock between processes: flock of a file that is made for it and stays. Linux's network file
// systems carry it to other machines.
//
// Contract: construction blocks for at most `patience`; throws UsageError where somebody else holds
// the lock for longer, or the file cannot be opened. Where the file system has no locks nothing is
// locked. Two objects exclude one another within a process, too. The lock ends with the object or
// the process.
#pragma once

#include <string>

#include "common/clock.h"

namespace tessera {

class FileLock {
 public:
  FileLock(const std::string& path, Duration patience);
  ~FileLock();
  FileLock(const FileLock&) = delete;
  FileLock& operator=(const FileLock&) = delete;

 private:
  const int file_;
};

}  // namespace tessera
