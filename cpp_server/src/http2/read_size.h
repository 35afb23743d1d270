// How much of a connection is read in its next turn.
//
// Answers are written, and the calls that they end come back for the next ones, at the end of a
// turn. Most requests are heard in a few microseconds each, and 256 KiB of them in some
// milliseconds. One whose inputs lie in shared memory is as short as they are, but 256 KiB are
// copied for it: hundreds of those in one turn delay every answer by tens of milliseconds, and each
// of them has memory of its own that is in no cache, so that a loop that had once fallen behind did
// not catch up.
//
// Contract: a pure function.
#pragma once

#include <algorithm>
#include <cstddef>

#include "common/clock.h"

namespace tessera::http2 {

// What must be read of a connection in a turn.
inline constexpr std::size_t kLeastReadBytes = 16 * 1024;
// Hearing what was read should not take longer.
inline constexpr Duration kLongHearing = std::chrono::milliseconds(4);

// After `heard` bytes, of up to `now` that might be read, took so long; at most `most`.
inline std::size_t next_read_bytes(std::size_t now, std::size_t heard, Duration took,
                                   std::size_t most) {
  if (took > kLongHearing) return std::max(heard / 2, kLeastReadBytes);
  return std::min(2 * now, most);
}

}  // namespace tessera::http2
