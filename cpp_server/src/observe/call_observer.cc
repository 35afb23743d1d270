#include "observe/call_observer.h"

#include <exception>
#include <utility>

#include "common/flags.h"
#include "security/secret_file.h"

namespace tessera {
namespace {

std::unique_ptr<AccessLog> opened(const std::string& path) {
  return path.empty() ? nullptr : std::make_unique<AccessLog>(path);
}

std::unique_ptr<SpanExporter> started(const ObserverOptions& options,
                                      const std::string& server_version, const Log& log) {
  if (options.otlp_endpoint.empty()) return nullptr;
  CollectorClient client(read_collector(options.otlp_endpoint), options.otlp_ca,
                         options.otlp_headers_file);
  if (!options.otlp_headers_file.empty()) warn_if_readable(options.otlp_headers_file, log);
  return std::make_unique<SpanExporter>(std::move(client), spans_frame(server_version), log);
}

std::unique_ptr<RequestRecorder> recording(const RecordOptions& options, const Log& log) {
  return options.folder.empty() ? nullptr : std::make_unique<RequestRecorder>(options, log);
}

}  // namespace

CallObserver::CallObserver(const ObserverOptions& options, const std::string& server_version,
                           const Log& log)
    : log_(log),
      trace_share_(options.trace_share),
      lines_(opened(options.access_log)),
      exporter_(started(options, server_version, log)),
      recorder_(recording(options.record, log)) {}

bool CallObserver::traces(const std::optional<TraceParent>& parent) const {
  if (exporter_ == nullptr) return false;
  if (parent.has_value()) return parent->sampled;
  return trace_share_ > 0 && random_share() < trace_share_;
}

bool CallObserver::begin(std::string_view traceparent, CallRecord& record) const {
  if (lines_ == nullptr && exporter_ == nullptr) return false;
  const auto parent = read_traceparent(traceparent);
  record.logged = lines_ != nullptr;
  record.traced = traces(parent);
  if (!record.logged && !record.traced) return false;
  record.trace_id.clear();
  record.parent_id.clear();
  if (parent.has_value()) {
    record.trace_id = parent->trace_id;
    record.parent_id = parent->span_id;
  } else if (record.traced) {
    append_random_digits(record.trace_id);
    append_random_digits(record.trace_id);
  }
  return true;
}

void CallObserver::tell(const CallRecord& record) noexcept {
  if (record.logged) lines_->write(record);
  if (!record.traced) return;
  try {
    exporter_->put(spans_of(record, std::chrono::system_clock::now()));
  } catch (const std::exception&) {  // no memory for the spans
    exporter_->drop(1);
  }
}

void CallObserver::drop() noexcept {
  if (lines_ != nullptr) lines_->drop_line();
}

void CallObserver::reopen() {
  if (!has_file()) return;
  try {
    lines_->reopen();
    log_.info("access_log_reopened");
  } catch (const UsageError& error) {
    log_.warning("access_log_not_reopened", {{"error", std::string(error.what())}});
  }
}

void CallObserver::flush() noexcept {
  if (lines_ != nullptr) lines_->flush();
  if (exporter_ != nullptr) exporter_->close();
  if (recorder_ != nullptr) recorder_->flush();
}

}  // namespace tessera
