// A few of the last requests of each model of a repository, with which a
// version that comes is called before it answers: what nobody has asked yet is
// slow the first time.
//
// Every kOneIn-th request is copied, of at most kMostBytes; of a model the last
// kKept are there, of all models together kAllBytes. Nothing leaves the
// process, and nothing is written anywhere.
//
// Contract: any thread; due and add block for no longer than another thread
// copies one pointer.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "common/clock.h"
#include "common/mutex.h"
#include "front/wire_protocol.h"
#include "model/served_model.h"
#include "request/wire.h"

namespace tessera {

// One request as it came, and another protocol that reads it.
struct RecentRequest {
  std::vector<std::byte> message;
  std::unique_ptr<WireProtocol> protocol;
};

class RecentRequests {
 public:
  using Sample = std::vector<std::shared_ptr<const RecentRequest>>;

  static constexpr std::uint32_t kOneIn = 64;
  static constexpr std::size_t kKept = 16;
  static constexpr std::size_t kMostBytes = 64 * 1024;
  static constexpr std::size_t kAllBytes = 16 * 1024 * 1024;

  // Whether the calling thread's next request is one of those that are kept.
  static bool due();

  // Keeps a copy of `message` to `model`, which `protocol` has decoded; not where
  // it is too large.
  void add(const std::string& model, Bytes message, const WireProtocol& protocol);

  // The last requests to `model`, in no order.
  Sample of(const std::string& model) const;

  // There is no such model any more.
  void forget(const std::string& model);

 private:
  struct Kept {
    std::array<std::shared_ptr<const RecentRequest>, kKept> last;
    std::size_t next = 0;
  };

  mutable Mutex mutex_;
  std::map<std::string, Kept> models_ TESSERA_GUARDED_BY(mutex_);
  std::size_t bytes_ TESSERA_GUARDED_BY(mutex_) = 0;
};

// What came of the requests that a version was called with before it answers.
struct WarmUpCounts {
  int answered = 0;
  int unfit = 0;   // its features, or their values, are others
  int failed = 0;  // it could not compute them, or not in time
};

// Lets `model`, which answers nobody yet, compute `sample` on its own workers,
// one after the other, with pauses; its scores are thrown away. Blocks for a
// few seconds at most.
WarmUpCounts warm_up_with(const RecentRequests::Sample& sample, ServedModel& model,
                          const Clock& clock);

}  // namespace tessera
