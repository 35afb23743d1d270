// The gRPC port: the services' methods on an HTTP/2 server of our own (http2/server.h). The loops'
// threads parse, check and queue calls; workers write the answers, which the loops send.
//
// Contract: start, stop and release are called once each, by one thread, in this order; stop blocks
// for up to `grace`. set_serving and announce_end may be called from any thread in between. The
// models' workers must have ended before release, and every call has then been answered or dropped.
#pragma once

#include <memory>
#include <string>

#include "common/clock.h"
#include "front/predict_service.h"
#include "front/server_facts.h"
#include "http2/call_gate.h"
#include "http2/limits.h"
#include "http2/server_tls.h"

namespace tessera {

struct GrpcOptions {
  std::string host;
  int port = 0;                  // 0: any free one
  std::string socket_file = {};  // a Unix socket beside the port (front/socket_file.h); empty: none
  http2::Limits limits = {};
  // Both outlive the front; null: every call may be heard, and connections are not encrypted.
  http2::CallGate* gate = nullptr;
  const http2::ServerTls* tls = nullptr;
};

class GrpcFront {
 public:
  // `context`, what `facts` refers to, and `counters` must outlive the front.
  GrpcFront(const PredictContext& context, ServerFacts facts, http2::Counters& counters);
  ~GrpcFront();
  GrpcFront(const GrpcFront&) = delete;
  GrpcFront& operator=(const GrpcFront&) = delete;

  // Listens, with `threads` loops and every service NOT_SERVING; returns the port. Throws
  // UsageError when the address cannot be had.
  int start(const GrpcOptions& options, int threads);

  // What grpc.health.v1.Health says of `service`; the empty name is the server as a whole.
  void set_serving(const std::string& service, bool serving);

  // There is no service of that name any more: NOT_FOUND.
  void forget(const std::string& service);

  // Asks clients to begin their further calls elsewhere; those that come are still heard.
  void announce_end();

  // Ends every watch and every connection, each when its last answer has left; after `grace` those
  // that are left wait for release.
  void stop(Duration grace);

  // Ends the loops. No call may be answered any more: the workers have ended.
  void release();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace tessera
