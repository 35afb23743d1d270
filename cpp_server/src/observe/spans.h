// A traced call as spans of OpenTelemetry, in OTLP's JSON: a server span and, of a call that was
// answered, one for each stage that it went through. docs/observe.md has names and attributes;
// serving/server/observe/spans.py writes the same ones.
//
// The stages were measured one by one, as durations: their spans are laid end to end from where the
// server span begins, but encode, which ends with it. What lies before forward is copying the batch
// to its device, and what lies before encode is splitting its scores. Stages of a request that was
// computed in several parts are sums, which may be longer than the call where the parts ran side by
// side: then they are cut where encode begins.
//
// JSON, since all of it is a stable part of OTLP and needs no library and no generated code, and
// since a few kilobytes of each traced call are made, not of each call.
// Sources: https://opentelemetry.io/docs/specs/otlp/ (JSON Protobuf Encoding),
// https://opentelemetry.io/docs/specs/semconv/rpc/grpc/ and .../http/http-spans/.
//
// Contract: free functions without state; any thread. They may throw std::bad_alloc.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>

#include "observe/call_record.h"

namespace tessera {

struct CallSpans {
  std::string json;  // the spans, parted by commas
  std::uint64_t count = 0;
};

// The spans of `record`, a traced call that ended at `ended`.
CallSpans spans_of(const CallRecord& record, std::chrono::system_clock::time_point ended);

// What comes before and after the spans of a request to a collector: the resource, which is this
// server of this version on this host. OTEL_SERVICE_NAME of the environment names another service
// than "tessera".
struct SpansFrame {
  std::string before;
  std::string after;
};

SpansFrame spans_frame(const std::string& server_version);

}  // namespace tessera
