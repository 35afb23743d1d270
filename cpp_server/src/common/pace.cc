#include "common/pace.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "common/cpus.h"
#include "csrc/idle_thread.h"
#include "csrc/pauses.h"

namespace tessera {
namespace {

constexpr Duration kQuiet = std::chrono::seconds(1);
constexpr Duration kMostWait = std::chrono::milliseconds(1);

TimePoint now() { return std::chrono::steady_clock::now(); }

}  // namespace

double aside_share(int cpus) {
  constexpr double kOfAll = 1.0 / 10;
  return std::min(kOfAll * cpus, 1.0);
}

double idle_share(int cpus) {
  constexpr double kOfAll = 1.0 / 4;
  return std::min(kOfAll * cpus, 1.0);
}

Pace::Pace(std::function<bool()> answering, clockid_t cpu, double share)
    : answering_(std::move(answering)),
      part_(share),
      cpus_(available_cpus()),
      cpu_(cpu),
      seen_(now()) {
  begin();
}

void Pace::begin() {
  share_ = part_ * (is_idle() ? idle_share(cpus_) : aside_share(cpus_));
  thread_ = std::this_thread::get_id();
  last_ = now();
  used_ = time_of(cpu_);
}

bool Pace::anybody(TimePoint at) {
  if (answering_ == nullptr || answering_()) seen_ = at;
  return at - seen_ < kQuiet;
}

void Pace::sleep(Duration length) const {
  std::this_thread::sleep_for(length);
  if (answering_ == nullptr) return;
  for (Duration more{0}; more < kMostWait && answering_(); more += kLeastPause) {
    std::this_thread::sleep_for(kLeastPause);
  }
}

void Pace::rest() {
  rest([](const std::function<void()>& sleep) { sleep(); });
}

void Pace::rest(const Pause& pause) {
  // Another thread, which has used other time, goes on with the work.
  if (thread_ != std::this_thread::get_id()) begin();
  const TimePoint at = now();
  const Duration work = time_of(cpu_) - used_;
  const Duration length = pause_behind(work, at - last_, share_);
  // Time that has passed without a CPU does not count later.
  if (length == Duration::zero() && at - last_ < work + kMostPause) return;
  if (length > Duration::zero() && anybody(at)) pause([&] { sleep(length); });
  begin();
}

}  // namespace tessera
