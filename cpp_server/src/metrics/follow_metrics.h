// The counters of one version's log of commits.
//
// Contract: every member may be used from any thread; trouble blocks for microseconds.
#pragma once

#include <array>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "common/mutex.h"
#include "metrics/histogram.h"
#include "package/format_rules.h"

namespace tessera {

// Upper bounds in seconds of what applying a commit takes while nothing else is computed.
inline constexpr std::array<double, 10> kApplyBuckets = {.0001, .0003, .001, .003, .01,
                                                         .03,   .1,    .3,   1.0,  3.0};

class FollowMetrics {
 public:
  std::atomic<bool> followed = false;  // the version is loaded and its log is followed
  std::atomic<std::int64_t> commit = 0;
  std::atomic<std::uint64_t> rows = 0;  // of tables, that commits have changed
  Histogram apply{kApplyBuckets};
  std::array<std::atomic<std::uint64_t>, kCommitRefusals.size()> refused{};

  void count_refused(std::string_view reason) {
    for (std::size_t i = 0; i < kCommitRefusals.size(); ++i) {
      if (kCommitRefusals[i] == reason) refused[i].fetch_add(1, std::memory_order_relaxed);
    }
  }

  // When the newest training example of the state was made, seconds since 1970; nothing: not known.
  void set_newest_example(std::optional<double> seconds) {
    newest_example_s_ = seconds.value_or(std::numeric_limits<double>::quiet_NaN());
  }
  std::optional<double> newest_example() const {
    const double seconds = newest_example_s_;
    return std::isnan(seconds) ? std::nullopt : std::optional(seconds);
  }

  // Why the log is not followed any further; empty: it is.
  void set_trouble(std::string why) {
    const MutexLock lock(mutex_);
    trouble_ = std::move(why);
  }
  std::string trouble() const {
    const MutexLock lock(mutex_);
    return trouble_;
  }

 private:
  std::atomic<double> newest_example_s_ = std::numeric_limits<double>::quiet_NaN();
  mutable Mutex mutex_;
  std::string trouble_ TESSERA_GUARDED_BY(mutex_);
};

}  // namespace tessera
