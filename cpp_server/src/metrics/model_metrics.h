// The counters of one version of a model: plain atomics that metrics_page.h renders when somebody
// asks. They begin before the version is loaded and outlive it.
//
// Contract: every member may be used from any thread. set_loaded, clear_loaded and while_loaded
// block while another thread is in one of them; nothing else blocks.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "batching/pending_request.h"
#include "batching/policy.h"
#include "common/enums.h"
#include "common/mutex.h"
#include "common/spread.h"
#include "common/status.h"
#include "metrics/feature_counter.h"
#include "metrics/follow_metrics.h"
#include "metrics/histogram.h"
#include "metrics/range_histograms.h"
#include "metrics/score_counter.h"
#include "model/runner.h"

namespace tessera {

enum class Stage { kDecode, kQueue, kAssemble, kTransfer, kForward, kSplit, kEncode };
inline constexpr auto kStageNames = std::to_array<std::string_view>(
    {"decode", "queue", "assemble", "transfer", "forward", "split", "encode"});
static_assert(kStageNames.size() == enum_size<Stage::kEncode>());

// The codes that requests end with, in the order in which they are shown.
inline constexpr std::array<Code, 8> kCountedCodes = {Code::kOk,
                                                      Code::kInvalidArgument,
                                                      Code::kNotFound,
                                                      Code::kResourceExhausted,
                                                      Code::kDeadlineExceeded,
                                                      Code::kCancelled,
                                                      Code::kUnavailable,
                                                      Code::kInternal};

class ModelMetrics {
 public:
  // `name` is what requests use; both are empty for requests of no known model.
  ModelMetrics(std::string name, std::string its_version)
      : model(std::move(name)), version(std::move(its_version)) {}

  const std::string model;
  const std::string version;

  void count_request(Code code, Duration took) {
    Counts& mine = counts_.mine();
    for (std::size_t i = 0; i < kCountedCodes.size(); ++i) {
      if (kCountedCodes[i] == code) mine.requests[i].fetch_add(1, std::memory_order_relaxed);
    }
    duration.observe(seconds(took));
    (code == Code::kOk ? mine.answered_ns : mine.failed_ns)
        .fetch_add(static_cast<std::uint64_t>(took.count()), std::memory_order_relaxed);
  }

  // The samples of a request that is answered OK.
  void count_answered(std::int64_t samples, TimePoint when) {
    Counts& mine = counts_.mine();
    mine.answered_samples.fetch_add(static_cast<std::uint64_t>(samples), std::memory_order_relaxed);
    mine.last_answer_ns.store(when.time_since_epoch().count(), std::memory_order_relaxed);
  }

  void count_rejected(RejectReason reason) {
    rejected[static_cast<std::size_t>(reason)].fetch_add(1, std::memory_order_relaxed);
  }

  void count_batch(CutReason reason) {
    counts_.mine().batches[static_cast<std::size_t>(reason)].fetch_add(1,
                                                                       std::memory_order_relaxed);
  }

  void observe_stage(Stage stage, double seconds) {
    stages[static_cast<std::size_t>(stage)].observe(seconds);
  }

  // One forward pass.
  void observe_pass(const PassTimings& pass, Duration split) {
    observe_stage(Stage::kAssemble, seconds(pass.assemble));
    observe_stage(Stage::kTransfer, seconds(pass.transfer));
    observe_stage(Stage::kForward, seconds(pass.forward));
    observe_stage(Stage::kSplit, seconds(split));
    batch_requests.observe(static_cast<double>(pass.requests));
    batch_samples.observe(static_cast<double>(pass.samples));
    batch_ids.observe(static_cast<double>(pass.ids));
    counts_.mine().ids.fetch_add(static_cast<std::uint64_t>(pass.ids), std::memory_order_relaxed);
  }

  // Requests that ended with the code at `index` of kCountedCodes.
  std::uint64_t requests(std::size_t index) const {
    return sum([index](const Counts& some) -> auto& { return some.requests[index]; });
  }
  std::uint64_t batches(CutReason reason) const {
    const auto index = static_cast<std::size_t>(reason);
    return sum([index](const Counts& some) -> auto& { return some.batches[index]; });
  }
  // The durations of requests that were answered OK, and of all others.
  std::uint64_t answered_ns() const {
    return sum([](const Counts& some) -> auto& { return some.answered_ns; });
  }
  std::uint64_t failed_ns() const {
    return sum([](const Counts& some) -> auto& { return some.failed_ns; });
  }
  // The samples of requests that were answered OK.
  std::uint64_t answered_samples() const {
    return sum([](const Counts& some) -> auto& { return some.answered_samples; });
  }
  // When (by the server's clock) the last request was answered OK; 0: none was yet.
  std::int64_t last_answer_ns() const {
    std::int64_t last = 0;
    counts_.each([&](const Counts& some) {
      last = std::max(last, some.last_answer_ns.load(std::memory_order_relaxed));
    });
    return last;
  }
  // Ids of all passes.
  std::uint64_t ids() const {
    return sum([](const Counts& some) -> auto& { return some.ids; });
  }

  // What is known while the model is loaded.
  struct Facts {
    std::function<std::string()> sha256;  // of the file; empty until it is known
    std::string torch;
    std::string dtype;
    std::string device;
    double load_seconds = 0;
  };
  // What is read when somebody asks.
  struct Gauges {
    std::function<std::int64_t()> queue_requests;
    std::function<std::int64_t()> queue_samples;
    std::function<std::vector<DeviceMemory>()> memory;
  };
  // One device that the model is on.
  struct DeviceCounters {
    explicit DeviceCounters(std::string its_name) : name(std::move(its_name)) {}
    const std::string name;
    std::atomic<std::int64_t> inflight_batches = 0;
  };

  std::array<std::atomic<std::uint64_t>, kRejectReasons> rejected{};
  Histogram duration{kLatencyBuckets};
  std::array<Histogram, kStageNames.size()> stages{
      Histogram(kLatencyBuckets), Histogram(kLatencyBuckets), Histogram(kLatencyBuckets),
      Histogram(kLatencyBuckets), Histogram(kLatencyBuckets), Histogram(kLatencyBuckets),
      Histogram(kLatencyBuckets)};
  Histogram batch_requests{kRequestBuckets};
  Histogram batch_samples{kSampleBuckets};
  Histogram batch_ids{kIdBuckets};
  std::atomic<std::uint64_t> out_of_range_ids = 0;
  std::atomic<bool> ready = false;
  FollowMetrics follow;

  // What a loaded model shows of itself.
  struct Loaded {
    Facts facts;
    Gauges gauges;
    std::unique_ptr<FeatureCounter> features;
    std::unique_ptr<RangeHistograms> ranges;
    std::unique_ptr<ScoreCounter> scores;
    std::deque<DeviceCounters> devices;
    std::atomic<std::uint64_t> buffer_bytes = 0;  // of the host, for batches of all workers

    // Batches that workers hold, on all devices.
    std::int64_t inflight_batches() const {
      std::int64_t held = 0;
      for (const DeviceCounters& device : devices) {
        held += device.inflight_batches.load(std::memory_order_relaxed);
      }
      return held;
    }
  };

  // `loaded` is shown from now on.
  void set_loaded(std::shared_ptr<const Loaded> loaded) {
    const MutexLock lock(loading_);
    loaded_ = std::move(loaded);
  }

  // What was shown is not called any more once this has returned. Where it has been replaced
  // meanwhile, by the same version loaded again, nothing happens.
  void clear_loaded(const Loaded& loaded) {
    const MutexLock lock(loading_);
    if (loaded_.get() == &loaded) loaded_.reset();
  }

  // Calls `use` with what is shown, if the model is loaded.
  template <typename Use>
  void while_loaded(const Use& use) const {
    const MutexLock lock(loading_);
    if (loaded_ != nullptr) use(*loaded_);
  }

 private:
  // What every request and pass counts.
  struct alignas(64) Counts {
    std::array<std::atomic<std::uint64_t>, kCountedCodes.size()> requests{};
    std::array<std::atomic<std::uint64_t>, kCutReasons> batches{};
    std::atomic<std::uint64_t> answered_ns = 0;
    std::atomic<std::uint64_t> failed_ns = 0;
    std::atomic<std::uint64_t> answered_samples = 0;
    std::atomic<std::int64_t> last_answer_ns = 0;
    std::atomic<std::uint64_t> ids = 0;
  };

  // `member` gives one of its counters.
  template <typename Member>
  std::uint64_t sum(const Member& member) const {
    return counts_.sum(
        [&](const Counts& some) { return member(some).load(std::memory_order_relaxed); });
  }

  Spread<Counts> counts_;
  mutable Mutex loading_;
  std::shared_ptr<const Loaded> loaded_ TESSERA_GUARDED_BY(loading_);
};

}  // namespace tessera
