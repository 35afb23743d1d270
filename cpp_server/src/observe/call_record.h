// What is told of one call for scores when it has ended: who asked, for what, and how it went.
//
// Contract: plain state of one call, used again for the next; it belongs to whoever has the call.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "common/clock.h"
#include "common/status.h"
#include "request/wire.h"

namespace tessera {

struct CallRecord {
  // Where it comes from; the transport's to fill.
  std::string_view protocol;  // "grpc" or "rest"
  std::string_view route;     // of REST: the path's form, as docs/openapi.yaml has it
  std::string peer;           // the client's IP address; empty where the system does not say
  std::string request_id;     // the client's, or one that was made

  // The trace that it belongs to; the observer's to fill (observe/call_observer.h).
  std::string trace_id;   // of the client's traceparent, or made; empty: it has none
  std::string parent_id;  // the span of the client's traceparent; empty: it gave none
  bool logged = false;    // it gets a line of the access log
  bool traced = false;    // it gets spans

  // How it went. The views are borrowed until it has been told.
  std::string_view method;   // "Predict" or "ModelInfer"
  std::string_view model;    // that answered or refused; empty: the call names none
  std::string_view version;  // of that model
  std::int64_t samples = 0;  // of a request that was read; else 0
  std::int64_t ids = 0;      // as they are looked up
  Code code = Code::kOk;
  int http_status = 0;  // of REST; 0: over gRPC
  Duration took{0};
  std::optional<StageTimings> timings;  // of a call that was answered
  Duration encode{0};                   // what writing its answer took, of such a call
};

}  // namespace tessera
