// A served model without a server: requests are arrays of the caller's, and completions wait in a
// queue until the caller takes them. tessera_engine.h is its C API and has the contract of each
// call; everything between a request's arrays and its scores is ServedModel's.
//
// What is bounded: requests that wait for a worker by the model's queue, and all that have been
// taken and whose completion has not, by --max-inflight-bytes, counted as the server counts them.
//
// Contract: any thread. submit does not block; wait blocks as long as it is told to; close blocks
// until what was taken is computed. The destructor closes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "batching/pending_request.h"
#include "common/clock.h"
#include "common/mutex.h"
#include "common/status.h"
#include "engine/tessera_engine.h"
#include "front/admission.h"
#include "front/byte_budget.h"
#include "metrics/model_metrics.h"
#include "model/loader.h"
#include "model/served_model.h"
#include "server/config.h"
#include "server/log.h"

namespace tessera {

// `words` as flags of a package at `path`. Throws UsageError, also for a flag that is a server's
// alone.
ServerConfig engine_config(const std::string& path, const std::vector<std::string>& words);

// As much of `text` as fits, cut between characters, and a zero.
void copy_text(std::string_view text, std::span<char> out);

class Engine {
 public:
  // Throws what ServedModel throws.
  Engine(LoadedPackage package, const ServerConfig& config);
  ~Engine();
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  const Manifest& manifest() const { return manifest_; }
  std::int64_t scores_per_sample() const { return scores_per_sample_; }
  std::size_t features(Group group) const { return group == Group::kIdList ? plain_ : scored_; }

  // Takes requests in their order and counts them in `taken`: each will have a completion. What is
  // not OK is why the next one was not taken. Throws std::bad_alloc where there is no memory for
  // it.
  Status submit(std::span<const tessera_engine_submission> submissions, std::size_t& taken);

  // As tessera_engine_wait. Throws nothing.
  std::int64_t wait(std::span<tessera_engine_completion> completions, std::int64_t timeout_us);

  // Ends the model, too.
  void close();

 private:
  class Request;
  struct Entered;
  struct Lot;

  Status check(const tessera_engine_request& request, std::span<float> scores) const;
  PredictionRequestView view(const tessera_engine_request& request) const;
  Status take(const tessera_engine_request& request, Request& taken);
  // Checks and appends one request.
  Status add(const tessera_engine_submission& submission, Lot& lot);
  void finish(Request& request);

  const ServerConfig config_;
  const Log log_;
  const SteadyClock clock_;
  ByteBudget budget_;
  Mutex mutex_;
  Condition finished_;  // a request has, or the engine is closed
  Condition empty_;     // nothing is inside any more
  // Finished requests in their order, linked by Request::next.
  Request* first_ TESSERA_GUARDED_BY(mutex_) = nullptr;
  Request* last_ TESSERA_GUARDED_BY(mutex_) = nullptr;
  int waiting_ TESSERA_GUARDED_BY(mutex_) = 0;
  bool closed_ TESSERA_GUARDED_BY(mutex_) = false;
  Admission admission_;
  std::once_flag closing_;
  Manifest manifest_;
  std::int64_t scores_per_sample_ = 0;
  std::size_t plain_ = 0;
  std::size_t scored_ = 0;
  std::unique_ptr<ServedModel> model_;  // until it is closed; last: its workers use the rest
};

}  // namespace tessera

// What C code holds.
struct tessera_engine {
  tessera_engine(tessera::LoadedPackage package, const tessera::ServerConfig& config)
      : engine(std::move(package), config) {}

  tessera::Engine engine;
};
