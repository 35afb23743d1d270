// A limit on what a package's own code may take while it is loaded: an endless loop must not hold
// a start. The code runs inside torch, where nobody can interrupt it, so the process ends.
//
// Contract: the destructor blocks for microseconds.
#pragma once

#include <string>
#include <thread>

namespace tessera {

class TimeLimit {
 public:
  // Where this lives longer than `seconds`, writes a line about the package at `path` to stderr and
  // ends the process with status 2.
  TimeLimit(const std::string& path, double seconds);
  TimeLimit(const TimeLimit&) = delete;
  TimeLimit& operator=(const TimeLimit&) = delete;

 private:
  std::jthread thread_;
};

}  // namespace tessera
