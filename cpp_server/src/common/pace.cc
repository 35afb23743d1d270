#include "common/pace.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "common/cpus.h"
#include "csrc/pauses.h"

namespace tessera {
namespace {

constexpr Duration kQuiet = std::chrono::seconds(1);

TimePoint now() { return std::chrono::steady_clock::now(); }

}  // namespace

double aside_share(int cpus) {
  constexpr double kOfAll = 1.0 / 10;
  constexpr double kOfOne = 1.0 / 3;
  return std::min(kOfAll * cpus, kOfOne);
}

Pace::Pace(std::function<bool()> answering, clockid_t cpu)
    : answering_(std::move(answering)),
      share_(aside_share(available_cpus())),
      cpu_(cpu),
      seen_(now()),
      last_(now()),
      used_(used()) {}

Duration Pace::used() const {
  timespec time{};
  ::clock_gettime(cpu_, &time);
  return std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec);
}

bool Pace::anybody(TimePoint at) {
  if (answering_ == nullptr || answering_()) seen_ = at;
  return at - seen_ < kQuiet;
}

void Pace::rest() {
  rest([](Duration length) { std::this_thread::sleep_for(length); });
}

void Pace::rest(const Pause& pause) {
  const TimePoint at = now();
  const Duration work = used() - used_;
  const Duration length = pause_behind(work, at - last_, share_);
  // Time that has passed without a CPU does not count later.
  if (length == Duration::zero() && at - last_ < work + kMostPause) return;
  if (length > Duration::zero() && anybody(at)) pause(length);
  last_ = now();
  used_ = used();
}

}  // namespace tessera
