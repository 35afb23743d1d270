// POST /v2/models/NAME[/versions/VERSION]/infer: from a body to a body, by way of ModelInfer's
// messages, which take the same way as gRPC's (predict_service.h).
//
// One thread reads bodies and writes answers, one at a time, so that neither takes the HTTP port's
// thread nor more memory than one of them.
//
// Contract: begin is called on the loop's thread; `done` is called once, on any thread. What
// `context` refers to outlives every call. stop, from any thread, returns when what has begun has
// been read and submitted; from then on calls are refused as in a drain.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <thread>

#include "common/mutex.h"
#include "front/http_page.h"
#include "front/predict_service.h"

namespace tessera {

class RestCall;

class RestService {
 public:
  // Bodies may have `max_body_bytes`, before and after they were unpacked.
  RestService(const PredictContext& context, std::size_t max_body_bytes);
  ~RestService();
  RestService(const RestService&) = delete;
  RestService& operator=(const RestService&) = delete;

  // Whether a POST to `path` is for scores.
  static bool answers(const std::string& path);

  std::shared_ptr<HttpCall> begin(HttpRequest request, HttpDone done);
  void stop();

 private:
  friend class RestCall;

  // Has the thread work on `call`; false: it has ended. Allocates nothing, so that a call that has
  // been answered is answered in any case.
  bool post(const std::shared_ptr<RestCall>& call);
  void run();

  const PredictContext& context_;
  const std::size_t max_body_bytes_;
  Mutex mutex_;
  Condition came_;
  bool stopped_ TESSERA_GUARDED_BY(mutex_) = false;
  std::shared_ptr<RestCall> first_ TESSERA_GUARDED_BY(mutex_);  // of those that wait
  RestCall* last_ TESSERA_GUARDED_BY(mutex_) = nullptr;
  std::thread thread_;
};

}  // namespace tessera
