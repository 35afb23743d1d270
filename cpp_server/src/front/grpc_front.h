// The gRPC front: the only part that knows gRPC. Calls arrive on completion queues whose
// threads parse, check and queue them; workers send the answers.
//
// Contract: start and stop are called once each, by one thread, in this order; both block
// briefly (stop for up to `grace`). set_serving may be called from any thread in between.
// Every call must have been answered or dropped before the front is destroyed; the models'
// workers must have ended before release.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "common/clock.h"
#include "front/predict_service.h"
#include "front/server_facts.h"
#include "server/log.h"

namespace tessera {

struct GrpcOptions {
  std::string host;
  int port = 0;  // 0: any free one
  int max_message_bytes = 0;
  std::int64_t max_incoming_bytes = 0;  // of messages that have not come whole
  int threads = 1;                      // completion queues, each with a thread of its own
};

class GrpcFront {
 public:
  // `context`, and what `facts` refers to, must outlive the front.
  GrpcFront(const PredictContext& context, ServerFacts facts);
  ~GrpcFront();
  GrpcFront(const GrpcFront&) = delete;
  GrpcFront& operator=(const GrpcFront&) = delete;

  // From now on gRPC's own messages go to `log`, which must outlive the process's use of gRPC.
  static void log_to(const Log& log);

  // Listens, with every service NOT_SERVING; returns the port. Throws UsageError when the
  // address cannot be had.
  int start(const GrpcOptions& options);

  // What grpc.health.v1.Health says of `service`; the empty name is the server as a whole.
  void set_serving(const std::string& service, bool serving);

  // Ends every connection, then the server. Calls that run may lose their answers; `grace` is what
  // gRPC may take for its part.
  void stop(Duration grace);

  // Ends the completion queues. No call may be answered any more: the workers have ended.
  void release();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace tessera
