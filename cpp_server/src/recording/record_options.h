// What an operator may say of the recording of requests: docs/replay.md.
//
// Contract: plain values.
#pragma once

#include <cstdint>
#include <string>

namespace tessera {

struct RecordOptions {
  std::string folder = {};                            // empty: nothing is recorded
  double share = 0.01;                                // of the calls, 0 to 1
  std::int64_t file_bytes = std::int64_t{64} << 20;   // of one file at most
  std::int64_t folder_bytes = std::int64_t{1} << 30;  // of all files of the folder at most
};

}  // namespace tessera
