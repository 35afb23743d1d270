// What shadow versions have made of calls that other versions have answered.
//
// Contract: any thread; nothing blocks for more than microseconds. Counters stay valid for as long
// as somebody holds them.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "common/enums.h"
#include "common/mutex.h"
#include "metrics/histogram.h"
#include "repository/control.h"

namespace tessera {

// Absolute differences of scores.
inline constexpr std::array<double, 9> kDifferenceBuckets = {.0001, .0003, .001, .003, .01,
                                                             .03,   .1,    .3,   1};

// How a call that a shadow was to compute, too, has ended.
enum class ShadowResult {
  kCompared,
  kDropped,  // there was no room, or no time
  kFailed,   // the shadow refused it, or its scores cannot be compared
};
inline constexpr auto kShadowResults = enum_size<ShadowResult::kFailed>();

std::string_view result_name(ShadowResult result);

struct ShadowMetrics {
  ShadowMetrics(std::string its_model, std::string its_version, std::string its_shadow_version)
      : model(std::move(its_model)),
        version(std::move(its_version)),
        shadow_version(std::move(its_shadow_version)) {}

  void count(ShadowResult result) {
    calls[static_cast<std::size_t>(result)].fetch_add(1, std::memory_order_relaxed);
  }

  const std::string model;
  const std::string version;  // which answered
  const std::string shadow_version;
  Histogram difference{kDifferenceBuckets};
  std::array<std::atomic<std::uint64_t>, kShadowResults> calls{};
};

class ShadowList {
 public:
  using All = std::vector<std::shared_ptr<ShadowMetrics>>;

  // The counters of these two versions of `model`, new ones where there are none.
  std::shared_ptr<ShadowMetrics> of(const std::string& model, const std::string& version,
                                    const std::string& shadow_version);

  // Gives those whose two versions are in `entries`; the others are shown no more.
  All both_in(const std::vector<IndexEntry>& entries);

 private:
  Mutex mutex_;
  All all_ TESSERA_GUARDED_BY(mutex_);
};

}  // namespace tessera
