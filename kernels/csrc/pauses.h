// How long work beside answering pauses, so that it uses no more than a share of one CPU.
#pragma once

#include <algorithm>
#include <chrono>

namespace tessera {

inline constexpr std::chrono::nanoseconds kLeastPause = std::chrono::microseconds(100);
// A piece that took longer than it should is not paid for by seconds of silence.
inline constexpr std::chrono::nanoseconds kMostPause = std::chrono::milliseconds(50);

// How long the pause behind `used` of a CPU, within `passed` since the last pause, should be for
// work that may use `share` of a CPU; zero where it would be too short to be worth a sleep.
inline std::chrono::nanoseconds pause_behind(std::chrono::nanoseconds used,
                                             std::chrono::nanoseconds passed, double share) {
  const auto whole = std::chrono::duration_cast<std::chrono::nanoseconds>(
      std::chrono::duration<double>(used) / share);
  const std::chrono::nanoseconds pause = std::min(whole - passed, kMostPause);
  return pause < kLeastPause ? std::chrono::nanoseconds::zero() : pause;
}

}  // namespace tessera
