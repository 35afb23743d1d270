#include "observe/spans.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <string_view>

#include "observe/json_text.h"
#include "observe/request_ids.h"

namespace tessera {
namespace {

constexpr std::size_t kUsualBytes = 2'560;
// OTLP's numbers.
constexpr std::int64_t kInternalSpan = 1;
constexpr std::int64_t kServerSpan = 2;
constexpr std::string_view kErrorStatus = R"(,"status":{"code":2})";
constexpr std::int64_t kNanosPerMicro = 1'000;

// Writes one span after the other. Times are nanoseconds since 1970.
class SpanWriter {
 public:
  explicit SpanWriter(std::string_view trace_id) : trace_id_(trace_id) {
    spans_.json.reserve(kUsualBytes);
  }

  void begin(std::string_view id, std::string_view parent_id, std::string_view name,
             std::int64_t kind, std::int64_t from, std::int64_t to) {
    std::string& json = spans_.json;
    if (spans_.count++ > 0) json += ',';
    json.append(R"({"traceId":")").append(trace_id_).append(R"(","spanId":")").append(id);
    if (!parent_id.empty()) json.append(R"(","parentSpanId":")").append(parent_id);
    json += R"(","name":)";
    append_json_text(json, name);
    json += R"(,"kind":)";
    append_number(json, kind);
    json += R"(,"startTimeUnixNano":")";
    append_number(json, from);
    json += R"(","endTimeUnixNano":")";
    append_number(json, to);
    json += R"(","attributes":[)";
    attributes_ = 0;
  }

  void attribute(std::string_view key, std::string_view value) {
    open_attribute(key);
    spans_.json += R"("stringValue":)";
    append_json_text(spans_.json, value);
    spans_.json += "}}";
  }

  void attribute(std::string_view key, std::int64_t value) {
    open_attribute(key);
    spans_.json += R"("intValue":")";
    append_number(spans_.json, value);
    spans_.json += "\"}}";
  }

  void end(std::string_view status = {}) { spans_.json.append(1, ']').append(status).append("}"); }

  CallSpans take() { return std::move(spans_); }

 private:
  void open_attribute(std::string_view key) {
    if (attributes_++ > 0) spans_.json += ',';
    spans_.json.append(R"({"key":")").append(key).append(R"(","value":{)");
  }

  const std::string_view trace_id_;
  CallSpans spans_;
  int attributes_ = 0;
};

// The codes that are the server's fault, by the conventions for spans of servers.
bool is_error(Code code) {
  return code == Code::kDeadlineExceeded || code == Code::kInternal || code == Code::kUnavailable;
}

void write_server_span(SpanWriter& writer, const CallRecord& record, std::string_view id,
                       std::int64_t from, std::int64_t to) {
  const bool rest = record.protocol == "rest";
  const std::string_view service =
      record.method == "Predict" ? "predictor.Predictor" : "inference.GRPCInferenceService";
  const std::string name = rest ? std::string("POST ").append(record.route)
                                : std::string(service).append("/").append(record.method);
  writer.begin(id, record.parent_id, name, kServerSpan, from, to);
  if (rest) {
    writer.attribute("http.request.method", "POST");
    writer.attribute("http.route", record.route);
    writer.attribute("http.response.status_code", record.http_status);
  } else {
    writer.attribute("rpc.system", "grpc");
    writer.attribute("rpc.service", service);
    writer.attribute("rpc.method", record.method);
    writer.attribute("rpc.grpc.status_code", static_cast<std::int64_t>(record.code));
  }
  if (!record.peer.empty()) writer.attribute("network.peer.address", record.peer);
  writer.attribute("tessera.model", record.model);
  writer.attribute("tessera.version", record.version);
  writer.attribute("tessera.samples", record.samples);
  writer.attribute("tessera.ids", record.ids);
  writer.attribute("tessera.code", code_name(record.code));
  writer.attribute("tessera.request_id", record.request_id);
  writer.end(is_error(record.code) ? kErrorStatus : std::string_view());
}

struct StageSpan {
  std::string_view name;  // empty: no span, but time that passes
  std::int64_t micros = 0;
};

void write_stages(SpanWriter& writer, const CallRecord& record, std::string_view parent_id,
                  std::int64_t from, std::int64_t to) {
  const StageTimings& timings = *record.timings;
  const std::int64_t encode_from = std::max(from, to - record.encode.count());
  const std::array<StageSpan, 5> stages = {{{"decode", timings.decode_us},
                                            {"queue", timings.queue_us},
                                            {"assemble", timings.assemble_us},
                                            {"", timings.transfer_us},
                                            {"forward", timings.forward_us}}};
  std::string id;
  const auto write = [&](std::string_view name, std::int64_t begins, std::int64_t ends) {
    id.clear();
    append_random_digits(id);
    writer.begin(id, parent_id, name, kInternalSpan, begins, ends);
    if (name == "forward") {
      writer.attribute("tessera.batch_requests", timings.batch_requests);
      writer.attribute("tessera.batch_samples", timings.batch_samples);
    }
    writer.end();
  };
  for (const StageSpan& stage : stages) {
    const std::int64_t end = std::min(from + stage.micros * kNanosPerMicro, encode_from);
    if (!stage.name.empty()) write(stage.name, from, end);
    from = end;
  }
  write("encode", encode_from, to);
}

std::string host_name() {
  constexpr std::size_t kMost = 256;
  std::array<char, kMost> name{};
  return ::gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "";
}

}  // namespace

CallSpans spans_of(const CallRecord& record, std::chrono::system_clock::time_point ended) {
  const std::int64_t to =
      std::chrono::duration_cast<std::chrono::nanoseconds>(ended.time_since_epoch()).count();
  const std::int64_t from = to - record.took.count();
  std::string id;
  append_random_digits(id);
  SpanWriter writer(record.trace_id);
  write_server_span(writer, record, id, from, to);
  if (record.timings.has_value()) write_stages(writer, record, id, from, to);
  return writer.take();
}

SpansFrame spans_frame(const std::string& server_version) {
  const char* const service = std::getenv("OTEL_SERVICE_NAME");
  const bool named = service != nullptr && *service != '\0';
  SpansFrame frame;
  std::string& json = frame.before;
  const auto attribute = [&](std::string_view key, std::string_view value) {
    json.append(R"({"key":")").append(key).append(R"(","value":{"stringValue":)");
    append_json_text(json, value);
    json += "}},";
  };
  json = R"({"resourceSpans":[{"resource":{"attributes":[)";
  attribute("service.name", named ? service : "tessera");
  attribute("service.version", server_version);
  attribute("host.name", host_name());
  attribute("tessera.server", "cpp");
  json += R"({"key":"process.pid","value":{"intValue":")";
  append_number(json, ::getpid());
  json += R"("}}]},"scopeSpans":[{"scope":{"name":"tessera","version":)";
  append_json_text(json, server_version);
  json += R"(},"spans":[)";
  frame.after = "]}]}]}";
  return frame;
}

}  // namespace tessera
