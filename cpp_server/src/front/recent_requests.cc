#include "front/recent_requests.h"

#include <algorithm>
#include <future>
#include <limits>
#include <thread>
#include <utility>

namespace tessera {
namespace {

// What all of a warm-up may take.
constexpr Duration kPatience = std::chrono::seconds(3);
// Pauses, in times of what the call before has taken: those who wait for
// answers come first.
constexpr int kPauses = 2;

// A request that is computed for nobody; it owns itself from submit on.
class WarmUpCall final : public PendingRequest {
 public:
  explicit WarmUpCall(std::shared_ptr<const RecentRequest> recent)
      : recent_(std::move(recent)), protocol_(recent_->protocol->another()) {
    expect_parts(1, 0);
  }

  // Whether `model` takes it.
  bool decode_for(const ServedModel& model, TimePoint now) {
    if (!protocol_->parse(recent_->message)) return false;
    if (!protocol_->decode(model, now, *this).ok()) return false;
    deadline = now + kPatience;
    priority = std::numeric_limits<std::int32_t>::min();
    return true;
  }

  std::future<bool> answered() { return answered_.get_future(); }

 private:
  void answer(std::span<const OutputView> /*outputs*/, const StageTimings& /*timings*/) override {
    const std::unique_ptr<WarmUpCall> owner(this);
    answered_.set_value(true);
  }
  void fail(const Refusal& /*refusal*/) override {
    const std::unique_ptr<WarmUpCall> owner(this);
    answered_.set_value(false);
  }

  const std::shared_ptr<const RecentRequest> recent_;  // the request has views of its message
  const std::unique_ptr<WireProtocol> protocol_;
  std::promise<bool> answered_;
};

}  // namespace

bool RecentRequests::due() {
  thread_local std::uint32_t requests = 0;
  return requests++ % kOneIn == 0;
}

void RecentRequests::add(const std::string& model, Bytes message, const WireProtocol& protocol) {
  const std::size_t bytes = protocol.copy_bytes(message);
  if (bytes > kMostBytes) return;
  auto recent = std::make_shared<RecentRequest>();
  recent->message = protocol.copy(message);
  recent->protocol = protocol.another();
  std::shared_ptr<const RecentRequest> kept_now = std::move(recent);  // or what goes, at the end
  const MutexLock lock(mutex_);
  Kept& kept = models_[model];
  auto& place = kept.last[kept.next];
  const std::size_t before = place == nullptr ? 0 : place->message.size();
  if (bytes_ - before + bytes > kAllBytes) return;
  bytes_ += bytes - before;
  kept.next = (kept.next + 1) % kKept;
  place.swap(kept_now);
}

RecentRequests::Sample RecentRequests::of(const std::string& model) const {
  Sample sample;
  const MutexLock lock(mutex_);
  const auto found = models_.find(model);
  if (found == models_.end()) return sample;
  for (const auto& recent : found->second.last) {
    if (recent != nullptr) sample.push_back(recent);
  }
  return sample;
}

void RecentRequests::forget(const std::string& model) {
  const MutexLock lock(mutex_);
  const auto found = models_.find(model);
  if (found == models_.end()) return;
  for (const auto& recent : found->second.last) {
    if (recent != nullptr) bytes_ -= recent->message.size();
  }
  models_.erase(found);
}

WarmUpCounts warm_up_with(const RecentRequests::Sample& sample, ServedModel& model,
                          const Clock& clock) {
  WarmUpCounts counts;
  const TimePoint end = clock.now() + kPatience;
  for (const auto& recent : sample) {
    const TimePoint begin = clock.now();
    if (begin >= end) break;
    auto call = std::make_unique<WarmUpCall>(recent);
    if (!call->decode_for(model, begin)) {
      ++counts.unfit;
      continue;
    }
    std::future<bool> answered = call->answered();
    model.submit(*call);
    static_cast<void>(call.release());  // it owns itself, or has ended
    // One that does not end is left to its worker, as any other is.
    const bool in_time = answered.wait_for(end - begin) == std::future_status::ready;
    if (in_time && answered.get()) {
      ++counts.answered;
    } else {
      ++counts.failed;
    }
    std::this_thread::sleep_for(std::min(kPauses * (clock.now() - begin), end - begin));
  }
  return counts;
}

}  // namespace tessera
