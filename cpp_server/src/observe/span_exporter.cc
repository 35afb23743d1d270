#include "observe/span_exporter.h"

#include <algorithm>
#include <atomic>
#include <charconv>
#include <deque>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "common/mutex.h"
#include "common/text.h"
#include "common/thread_name.h"

namespace tessera {
namespace {

constexpr int kTooManyRequests = 429;
constexpr int kBadGateway = 502;
constexpr int kUnavailable = 503;
constexpr int kGatewayTimeout = 504;

bool may_try_again(int status) {
  return status == kTooManyRequests || status == kBadGateway || status == kUnavailable ||
         status == kGatewayTimeout;
}

// How many spans a collector that took a request says that it has refused.
std::uint64_t refused_spans(const std::string& body) {
  const auto told = nlohmann::json::parse(body, nullptr, /*allow_exceptions=*/false);
  if (!told.is_object() || !told.contains("partialSuccess")) return 0;
  const auto& partial = told.at("partialSuccess");
  if (!partial.is_object() || !partial.contains("rejectedSpans")) return 0;
  const auto& count = partial.at("rejectedSpans");
  if (count.is_number_unsigned()) return count.get<std::uint64_t>();
  // OTLP writes 64 bits as text.
  if (!count.is_string()) return 0;
  const auto& digits = count.get_ref<const std::string&>();
  std::uint64_t number = 0;
  const auto parsed = std::from_chars(digits.data(), digits.data() + digits.size(), number);
  return parsed.ec == std::errc() ? number : 0;
}

// What came of one request.
struct Outcome {
  std::string failure = {};  // empty: it was taken
  bool again = false;
  std::chrono::seconds retry_after{0};
  std::uint64_t refused = 0;
};

}  // namespace

Duration pause_after(int failures, std::chrono::seconds retry_after) {
  constexpr int kMostDoublings = 10;
  const Duration doubled =
      SpanExporter::kFirstPause * (1 << std::min(failures - 1, kMostDoublings));
  const Duration asked = std::min<std::chrono::seconds>(
      retry_after, std::chrono::duration_cast<std::chrono::seconds>(SpanExporter::kLongestPause));
  return std::min(std::max(doubled, asked), SpanExporter::kLongestPause);
}

class SpanExporter::Sender {
 public:
  Sender(CollectorClient collector, SpansFrame frame, const Log& log)
      : collector_(std::move(collector)), frame_(std::move(frame)), log_(&log) {}

  void put(CallSpans spans) noexcept {
    const MutexLock lock(mutex_);
    if (closed_ || calls_.size() >= kMostCalls || bytes_ + spans.json.size() > kMostBytes) {
      dropped_ += spans.count;
      return;
    }
    const std::size_t bytes = spans.json.size();
    const std::uint64_t count = spans.count;
    try {
      calls_.push_back(std::move(spans));
    } catch (const std::bad_alloc&) {
      dropped_ += count;
      return;
    }
    bytes_ += bytes;
    if (calls_.size() == 1 || calls_.size() == kRequestCalls) changed_.notify_all();
  }

  // Returns when everything has been tried, or the limit is over.
  void close() noexcept {
    const MutexLock lock(mutex_);
    closed_ = true;
    const TimePoint now = std::chrono::steady_clock::now();
    if (until_ == kNever) until_ = now + kFlushLimit;
    changed_.notify_all();
    while (!ended_ && std::chrono::steady_clock::now() < until_)
      changed_.wait_until(mutex_, until_);
    log_ = nullptr;
  }

  void run() noexcept {
    std::vector<CallSpans> calls;
    while (take(calls)) {
      std::uint64_t count = 0;
      for (const CallSpans& call : calls) count += call.count;
      std::uint64_t refused = count;
      try {
        refused = std::min(deliver(calls), count);
      } catch (const std::exception&) {  // no memory for the request
      }
      sent_ += count - refused;
      dropped_ += refused;
    }
    const MutexLock lock(mutex_);
    ended_ = true;
    changed_.notify_all();
  }

  std::atomic<std::uint64_t> sent_ = 0;
  std::atomic<std::uint64_t> dropped_ = 0;

 private:
  // Moves the calls of the next request into `calls`; false: there will be none.
  bool take(std::vector<CallSpans>& calls) noexcept {
    calls.clear();
    const MutexLock lock(mutex_);
    while (calls_.empty() && !closed_) changed_.wait(mutex_);
    const TimePoint due = std::chrono::steady_clock::now() + kGather;
    while (!closed_ && calls_.size() < kRequestCalls && std::chrono::steady_clock::now() < due) {
      changed_.wait_until(mutex_, due);
    }
    try {
      calls.reserve(kRequestCalls);
    } catch (const std::bad_alloc&) {
      return false;
    }
    while (!calls_.empty() && calls.size() < kRequestCalls) {
      bytes_ -= calls_.front().json.size();
      calls.push_back(std::move(calls_.front()));
      calls_.pop_front();
    }
    return !calls.empty();
  }

  // Returns how many spans of `calls` were not taken in the end.
  std::uint64_t deliver(const std::vector<CallSpans>& calls) {
    std::string body;
    for (const CallSpans& call : calls) body.append(body.empty() ? "" : ",").append(call.json);
    for (int tries = 1;; ++tries) {
      const bool last = !rest() || tries == kTries;
      const Outcome outcome = post(body);
      note(outcome);
      if (outcome.failure.empty()) return outcome.refused;
      if (!outcome.again || last) return std::numeric_limits<std::uint64_t>::max();
    }
  }

  Outcome post(const std::string& body) {
    TimePoint until = std::chrono::steady_clock::now() + kAnswerLimit;
    {
      const MutexLock lock(mutex_);
      until = std::min(until, until_);
    }
    try {
      const CollectorAnswer answer = collector_.post(frame_.before, body, frame_.after, until);
      constexpr int kHundred = 100;
      if (answer.status / kHundred == 2) return {.refused = refused_spans(answer.body)};
      return {.failure = text("it answered with status ", answer.status),
              .again = may_try_again(answer.status),
              .retry_after = answer.retry_after};
    } catch (const NoAnswer& error) {
      return {.failure = error.what(), .again = true};
    }
  }

  // Waits for the end of the pause that failures have asked for. False: the server ends.
  bool rest() noexcept {
    const MutexLock lock(mutex_);
    while (!closed_ && std::chrono::steady_clock::now() < resume_) {
      changed_.wait_until(mutex_, resume_);
    }
    return !closed_;
  }

  // Says where sending begins to fail, and where it works again.
  void note(const Outcome& outcome) {
    const MutexLock lock(mutex_);
    const bool failed = !outcome.failure.empty();
    if (failed) {
      const Duration pause = pause_after(++failures_, outcome.retry_after);
      resume_ = std::chrono::steady_clock::now() + pause;
      if (failures_ == 1 && log_ != nullptr) {
        log_->warning("spans_not_sent",
                      {{"collector", collector_.url()}, {"error", outcome.failure}});
      }
    } else if (std::exchange(failures_, 0) > 0 && log_ != nullptr) {
      log_->info("spans_sent_again", {{"collector", collector_.url()}});
    }
  }

  const CollectorClient collector_;
  const SpansFrame frame_;
  Mutex mutex_;
  Condition changed_;
  const Log* log_ TESSERA_GUARDED_BY(mutex_);  // null: it may be gone
  std::deque<CallSpans> calls_ TESSERA_GUARDED_BY(mutex_);
  std::size_t bytes_ TESSERA_GUARDED_BY(mutex_) = 0;
  bool closed_ TESSERA_GUARDED_BY(mutex_) = false;
  bool ended_ TESSERA_GUARDED_BY(mutex_) = false;
  TimePoint until_ TESSERA_GUARDED_BY(mutex_) = kNever;  // of everything, once it is closed
  int failures_ TESSERA_GUARDED_BY(mutex_) = 0;          // since the last success
  TimePoint resume_ TESSERA_GUARDED_BY(mutex_){};
};

SpanExporter::SpanExporter(CollectorClient collector, SpansFrame frame, const Log& log)
    : sender_(std::make_shared<Sender>(std::move(collector), std::move(frame), log)) {
  // Not joined: resolving a name may take as long as it likes.
  std::thread([sender = sender_] {
    name_thread("span-exporter");
    sender->run();
  }).detach();
}

SpanExporter::~SpanExporter() { close(); }

void SpanExporter::put(CallSpans spans) noexcept { sender_->put(std::move(spans)); }

void SpanExporter::drop(std::uint64_t count) noexcept { sender_->dropped_ += count; }

void SpanExporter::close() noexcept { sender_->close(); }

std::uint64_t SpanExporter::sent() const noexcept { return sender_->sent_; }

std::uint64_t SpanExporter::dropped() const noexcept { return sender_->dropped_; }

}  // namespace tessera
