// Spans on their way to a collector: a bounded queue and one thread, which sends what has come in a
// second, or sooner what fills a request. serving/server/observe/span_exporter.py does the same.
//
// What becomes of a request to the collector:
//   2xx                            its spans are sent, less those that the answer says it refused;
//   429, 502, 503, 504, no answer  it is sent again after a pause, kTries times in all;
//   another status                 it is dropped: it would be refused again.
// Pauses double from one failure to the next, up to half a minute, and end with the next success;
// an answer's Retry-After makes one longer, up to the same. Meanwhile spans wait in the queue, and
// those that find no room are dropped. What is dropped is counted.
//
// Contract: put, the counts and their readers belong to any thread, and neither block nor throw.
// The thread that sends outlives the exporter where it still waits for its collector.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "observe/collector_client.h"
#include "observe/spans.h"
#include "server/log.h"

namespace tessera {

class SpanExporter {
 public:
  static constexpr std::size_t kMostCalls = 2'048;                 // that wait
  static constexpr std::size_t kMostBytes = std::size_t{8} << 20;  // of their spans
  static constexpr std::size_t kRequestCalls = 512;                // of one request
  static constexpr int kTries = 5;
  static constexpr Duration kGather = std::chrono::seconds(1);
  static constexpr Duration kAnswerLimit = std::chrono::seconds(5);
  static constexpr Duration kFirstPause = std::chrono::seconds(1);
  static constexpr Duration kLongestPause = std::chrono::seconds(30);
  static constexpr Duration kFlushLimit = std::chrono::seconds(1);

  // `log` outlives this object, and hears when sending begins to fail and when it works again.
  SpanExporter(CollectorClient collector, SpansFrame frame, const Log& log);
  // As close.
  ~SpanExporter();
  SpanExporter(const SpanExporter&) = delete;
  SpanExporter& operator=(const SpanExporter&) = delete;

  void put(CallSpans spans) noexcept;

  // Counts spans that could not even be made.
  void drop(std::uint64_t count) noexcept;

  // Takes no more spans; tries once to send those that wait, for kFlushLimit at most.
  void close() noexcept;

  std::uint64_t sent() const noexcept;
  std::uint64_t dropped() const noexcept;

 private:
  class Sender;

  // Shared with the thread, which may outlive this object.
  std::shared_ptr<Sender> sender_;
};

// How long to wait before the next request after `failures` (1 or more) in a row, of which the last
// asked for `retry_after`.
Duration pause_after(int failures, std::chrono::seconds retry_after);

}  // namespace tessera
