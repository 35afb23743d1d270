#include "front/shadow_call.h"

#include <cmath>
#include <limits>
#include <new>
#include <utility>

#include "request/request_bytes.h"

namespace tessera {
namespace {

// A shadow's answer that comes later is of no use, and its memory is.
constexpr Duration kPatience = std::chrono::seconds(1);
// The part of the byte budget that has to be free, so that clients find room.
constexpr std::int64_t kFreeShare = 2;
// A shadow for which so many requests wait is busy.
constexpr std::int64_t kMostWaiting = 64;

bool busy(const ServedModel& shadow) {
  std::int64_t waiting = 0;
  shadow.metrics().while_loaded([&](const ModelMetrics::Loaded& loaded) {
    waiting = static_cast<std::int64_t>(loaded.gauges.queue_requests());
  });
  return waiting >= kMostWaiting;
}

}  // namespace

void ShadowComparison::computed(std::span<const OutputView> outputs) {
  const MutexLock lock(mutex_);
  if (over_) return;
  if (has_first_) {
    over_ = true;
    metrics_->count(compare(first_, outputs) ? ShadowResult::kCompared : ShadowResult::kFailed);
    return;
  }
  has_first_ = true;
  for (const OutputView& output : outputs) {
    first_.emplace(output.name, std::vector<float>(output.data, output.data + output.count));
  }
}

// Whether every output that both have could be compared, and there was one.
bool ShadowComparison::compare(const Scores& first, std::span<const OutputView> second) {
  bool comparable = false;
  for (const OutputView& output : second) {
    const auto other = first.find(output.name);
    if (other == first.end()) continue;
    if (other->second.size() != output.count) return false;
    for (std::size_t i = 0; i < output.count; ++i) {
      const double difference = std::abs(double{other->second[i]} - double{output.data[i]});
      if (!std::isfinite(difference)) return false;
      metrics_->difference.observe(difference);
    }
    comparable = true;
  }
  return comparable;
}

void ShadowComparison::ended(ShadowResult result) {
  const MutexLock lock(mutex_);
  if (over_) return;
  over_ = true;
  metrics_->count(result);
}

std::unique_ptr<ShadowCall> ShadowCall::copy(Bytes message, const WireProtocol& protocol,
                                             std::shared_ptr<ServedModel> shadow,
                                             std::shared_ptr<ShadowMetrics> metrics,
                                             ByteBudget& budget) {
  const auto bytes = static_cast<std::int64_t>(protocol.copy_bytes(message));
  if (busy(*shadow) || budget.held() + bytes > budget.limit() / kFreeShare) {
    metrics->count(ShadowResult::kDropped);
    return nullptr;
  }
  return std::unique_ptr<ShadowCall>(new ShadowCall(protocol.copy(message), protocol.another(),
                                                    std::move(shadow), std::move(metrics), budget));
}

ShadowCall::ShadowCall(std::vector<std::byte> message, std::unique_ptr<WireProtocol> protocol,
                       std::shared_ptr<ServedModel> shadow, std::shared_ptr<ShadowMetrics> metrics,
                       ByteBudget& budget)
    : message_(std::move(message)),
      protocol_(std::move(protocol)),
      shadow_(std::move(shadow)),
      comparison_(std::make_shared<ShadowComparison>(std::move(metrics))),
      budget_(budget) {}

ShadowCall::~ShadowCall() {
  if (held_bytes_ > 0) budget_.give(held_bytes_);
}

// Whether the request may be queued; otherwise it has been counted.
bool ShadowCall::prepare(const Clock& clock) {
  const TimePoint now = clock.now();
  expect_parts(1, 0);
  if (!protocol_->parse(message_) || !protocol_->decode(*shadow_, now, *this).ok()) {
    comparison_->ended(ShadowResult::kFailed);
    return false;
  }
  deadline = now + kPatience;
  priority = std::numeric_limits<std::int32_t>::min();
  // The message is held twice, and so are the scores of both versions.
  const std::int64_t bytes =
      RequestBytes::kCall +
      static_cast<std::int64_t>(message_.size() + protocol_->copied_bytes(*shadow_, request)) +
      2 * shadow_->request_bytes().samples_bytes(request.samples);
  if (budget_.held() + bytes > budget_.limit() / kFreeShare || !budget_.take(bytes)) {
    comparison_->ended(ShadowResult::kDropped);
    return false;
  }
  held_bytes_ = bytes;
  return true;
}

void ShadowCall::compute(std::unique_ptr<ShadowCall> call, const Clock& clock) {
  try {
    if (!call->prepare(clock)) return;
    // By a share of its own: the call may have ended, and its share with it, before submit returns.
    const std::shared_ptr<ServedModel> shadow = call->shadow_;
    shadow->submit(*call);
  } catch (const std::bad_alloc&) {
    call->comparison_->ended(ShadowResult::kDropped);
    return;
  }
  static_cast<void>(call.release());
}

void ShadowCall::answer(std::span<const OutputView> outputs, const StageTimings& /*timings*/) {
  const std::unique_ptr<ShadowCall> owner(this);
  try {
    comparison_->computed(outputs);
  } catch (const std::bad_alloc&) {
    comparison_->ended(ShadowResult::kDropped);
  }
}

void ShadowCall::fail(const Refusal& refusal) {
  const std::unique_ptr<ShadowCall> owner(this);
  comparison_->ended(refusal.reason.has_value() ? ShadowResult::kDropped : ShadowResult::kFailed);
}

}  // namespace tessera
