// Requests that a server has recorded (docs/replay.md), to be sent again.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "common/clock.h"

namespace tessera {

// In the order of their arrival.
struct Recording {
  std::vector<std::string> messages;
  std::vector<std::string_view> methods;  // of each, as a path; these live for ever
  std::vector<Duration> at;               // of each, after the first
  std::size_t cut_files = 0;              // that end before their last record does
};

// Reads a file, or all files of a folder. Throws UsageError where there is none, one is not a file
// of recorded requests, or there is no request.
Recording read_recording(const std::string& path);

}  // namespace tessera
