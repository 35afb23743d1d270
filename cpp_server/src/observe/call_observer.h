// What is told of single calls for scores: a line of the access log of each, spans of some, and
// their requests where these are recorded.
//
// Whether a call is traced is decided before it is computed, so that how it went makes no
// difference: a traceparent says it by its sampled flag; a share of the calls without one begins a
// trace of its own.
//
// Contract: begin, tell and the counts may be called from any thread and do not block; tell does
// not throw. reopen belongs to one thread. The log outlives the observer.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "observe/access_log.h"
#include "observe/call_record.h"
#include "observe/observer_options.h"
#include "observe/request_ids.h"
#include "observe/span_exporter.h"
#include "recording/request_recorder.h"
#include "server/log.h"

namespace tessera {

class CallObserver {
 public:
  // Throws UsageError where the access log cannot be opened, a file of the collector's cannot be
  // used, or the folder of recorded requests not be written to.
  CallObserver(const ObserverOptions& options, const std::string& server_version, const Log& log);

  // Whether any call is told of.
  bool active() const { return lines_ != nullptr || exporter_ != nullptr || recorder_ != nullptr; }

  // Whether the call with this traceparent header is told of; fills in what its trace is. Throws
  // std::bad_alloc.
  bool begin(std::string_view traceparent, CallRecord& record) const;

  // To be called when a call has just ended.
  void tell(const CallRecord& record) noexcept;

  // What is to record the request of the next call; null: it is not one of the share.
  RequestRecorder* recorder() const {
    return recorder_ != nullptr && recorder_->draws() ? recorder_.get() : nullptr;
  }

  // There was no memory for a call's record.
  void drop() noexcept;

  // Whether there is a file that can be opened again, and its opening, which tells the log.
  bool has_file() const { return lines_ != nullptr && lines_->has_file(); }
  void reopen();

  // Waits until what there is to tell has been told, for three seconds at most; spans are told no
  // more.
  void flush() noexcept;

  std::uint64_t dropped_lines() const { return lines_ == nullptr ? 0 : lines_->dropped_lines(); }
  std::uint64_t written_records() const { return recorder_ == nullptr ? 0 : recorder_->written(); }
  std::uint64_t dropped_records() const { return recorder_ == nullptr ? 0 : recorder_->dropped(); }
  std::uint64_t record_bytes() const { return recorder_ == nullptr ? 0 : recorder_->bytes(); }
  std::uint64_t sent_spans() const { return exporter_ == nullptr ? 0 : exporter_->sent(); }
  std::uint64_t dropped_spans() const { return exporter_ == nullptr ? 0 : exporter_->dropped(); }

 private:
  bool traces(const std::optional<TraceParent>& parent) const;

  const Log& log_;
  const double trace_share_;
  const std::unique_ptr<AccessLog> lines_;           // null: there is no access log
  const std::unique_ptr<SpanExporter> exporter_;     // null: no call is traced
  const std::unique_ptr<RequestRecorder> recorder_;  // null: nothing is recorded
};

}  // namespace tessera
