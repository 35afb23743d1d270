// A traced call's spans, where they go, and which calls are traced.
#include "observe/spans.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <chrono>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>

#include "common/flags.h"
#include "common/status.h"
#include "observe/call_observer.h"
#include "observe/collector.h"
#include "observe/collector_client.h"
#include "observe/span_exporter.h"

namespace tessera {
namespace {

using Json = nlohmann::json;

Code code_named(const std::string& name) {
  for (const Code code : {Code::kOk, Code::kNotFound, Code::kDeadlineExceeded}) {
    if (code_name(code) == name) return code;
  }
  throw std::invalid_argument(name);
}

// The views point into `call`.
CallRecord record_of(const Json& call) {
  const auto view = [&](const char* name) -> std::string_view {
    return call.at(name).get_ref<const std::string&>();
  };
  CallRecord record;
  record.protocol = view("protocol");
  record.route = view("route");
  record.peer = view("peer");
  record.method = view("method");
  record.model = view("model");
  record.version = view("version");
  record.request_id = view("request_id");
  record.trace_id = view("trace_id");
  record.parent_id = view("parent_id");
  record.samples = call.at("samples");
  record.ids = call.at("ids");
  record.http_status = call.at("http_status");
  record.code = code_named(call.at("code"));
  record.took = std::chrono::microseconds(call.at("took_us").get<std::int64_t>());
  const Json& timings = call.at("timings");
  if (timings.is_null()) return record;
  record.timings = StageTimings{.decode_us = timings.at("decode_us"),
                                .queue_us = timings.at("queue_us"),
                                .assemble_us = timings.at("assemble_us"),
                                .transfer_us = timings.at("transfer_us"),
                                .forward_us = timings.at("forward_us"),
                                .batch_requests = timings.at("batch_requests"),
                                .batch_samples = timings.at("batch_samples")};
  record.encode = std::chrono::microseconds(timings.at("encode_us").get<std::int64_t>());
  return record;
}

TEST(SpansTest, AreThoseOfTheCases) {
  // tests/server/test_spans.py expects the same of the same calls.
  std::ifstream file(TESSERA_SPAN_CASES);
  const Json all = Json::parse(file);
  const std::chrono::system_clock::time_point ended{
      std::chrono::nanoseconds(all.at("ended_ns").get<std::int64_t>())};
  for (const Json& one : all.at("cases")) {
    SCOPED_TRACE(one.at("case"));
    const CallSpans made = spans_of(record_of(one.at("call")), ended);
    Json spans = Json::parse("[" + made.json + "]");
    EXPECT_EQ(made.count, spans.size());
    std::set<std::string> ids;
    const std::string server = spans.at(0).at("spanId");
    for (Json& span : spans) {
      const std::string id = span.at("spanId");
      EXPECT_EQ(id.size(), 16u);
      EXPECT_EQ(id.find_first_not_of("0123456789abcdef"), std::string::npos) << id;
      EXPECT_TRUE(ids.insert(id).second);
      span.erase("spanId");
      if (span.value("parentSpanId", "") == server) span["parentSpanId"] = "server";
    }
    spans.at(0)["spanId"] = "server";
    EXPECT_EQ(spans, one.at("spans"));
  }
}

TEST(SpansTest, TheResourceIsThisServer) {
  const auto attributes = [] {
    const SpansFrame frame = spans_frame("9.9");
    const Json request = Json::parse(frame.before + "{}" + frame.after);
    EXPECT_EQ(request.at("resourceSpans").at(0).at("scopeSpans").at(0).at("spans").size(), 1u);
    std::map<std::string, Json> found;
    for (const Json& one : request.at("resourceSpans").at(0).at("resource").at("attributes")) {
      found[one.at("key")] = one.at("value");
    }
    return found;
  };
  ::unsetenv("OTEL_SERVICE_NAME");
  EXPECT_EQ(attributes().at("service.name").at("stringValue"), "tessera");
  ::setenv("OTEL_SERVICE_NAME", "ranking", 1);
  EXPECT_EQ(attributes().at("service.name").at("stringValue"), "ranking");
  EXPECT_EQ(attributes().at("service.version").at("stringValue"), "9.9");
  ::unsetenv("OTEL_SERVICE_NAME");
}

TEST(CollectorTest, ItsAddressIsRead) {
  const Collector plain = read_collector("http://127.0.0.1");
  EXPECT_EQ(plain.host + " " + plain.port + " " + plain.path, "127.0.0.1 4318 /v1/traces");
  const Collector other = read_collector("http://[::1]:99/base/");
  EXPECT_EQ(other.host + " " + other.port + " " + other.path, "::1 99 /base/v1/traces");
  EXPECT_EQ(other.authority, "[::1]:99");
  EXPECT_EQ(read_collector("http://[::1]").host, "::1");
  EXPECT_FALSE(other.encrypted);
  const Collector tls = read_collector("https://a/base");
  EXPECT_EQ(tls.host + " " + tls.port + " " + tls.path, "a 443 /base/v1/traces");
  EXPECT_TRUE(tls.encrypted);
  EXPECT_EQ(read_collector("https://a:4318").port, "4318");
  EXPECT_THROW(read_collector("ftp://a"), FlagError);
}

TEST(CollectorTest, ItsHeadersAreThoseOfTheCases) {
  // tests/server/test_spans.py expects the same of the same files.
  std::ifstream file(TESSERA_COLLECTOR_HEADER_CASES);
  for (const Json& one : Json::parse(file)) {
    SCOPED_TRACE(one.at("case"));
    const std::string content = one.at("content");
    std::string expected;
    if (one.contains("error")) {
      try {
        parse_collector_headers(content);
        ADD_FAILURE();
      } catch (const UsageError& error) {
        EXPECT_EQ(error.what(), one.at("error").get<std::string>());
      }
      continue;
    }
    for (const Json& header : one.at("headers")) {
      expected += header.at(0).get<std::string>() + ": " + header.at(1).get<std::string>() + "\r\n";
    }
    EXPECT_EQ(parse_collector_headers(content), expected);
  }
}

TEST(CollectorTest, WhatItAnswersIsReadOrRefused) {
  const CollectorAnswer answer =
      read_answer("HTTP/1.1 503 Busy\r\nRETRY-AFTER:  7 \r\nX: y\r\n\r\nbody");
  EXPECT_EQ(answer.status, 503);
  EXPECT_EQ(answer.retry_after, std::chrono::seconds(7));
  EXPECT_EQ(answer.body, "body");
  for (const char* strange :
       {"", "\r\n\r\n", "HTTP/1.\r\n\r\n", "HTTP/1.1 2x0 OK\r\n\r\n", "HTTP/1.1 200 OK\r\n",
        "HTTP/1.1 100 Continue\r\n\r\n", "SSH-2.0-OpenSSH\r\n\r\n", "HTTP/1.1-200 OK\r\n\r\n"}) {
    EXPECT_THROW(read_answer(strange), NoAnswer) << strange;
  }
  EXPECT_EQ(read_answer("HTTP/1.0 200\r\nRetry-After: Fri, 31 Dec\r\n\r\n").retry_after,
            std::chrono::seconds(0));
}

TEST(SpanExporterTest, PausesDoubleUpToTheLongest) {
  using std::chrono::seconds;
  EXPECT_EQ(pause_after(1, seconds(0)), seconds(1));
  EXPECT_EQ(pause_after(4, seconds(0)), seconds(8));
  EXPECT_EQ(pause_after(1'000'000, seconds(0)), seconds(30));
  EXPECT_EQ(pause_after(2, seconds(7)), seconds(7));
  EXPECT_EQ(pause_after(1, seconds::max()), seconds(30));
}

// Nobody listens on port 1 of this machine, so spans wait.
CallObserver observer_of(double share, const Log& log) {
  return {{.otlp_endpoint = "http://127.0.0.1:1", .trace_share = share}, "9.9", log};
}

TEST(CallObserverTest, AShareOfTheCallsWithoutATraceIsTraced) {
  const Log log(LogLevel::kError, true, -1);
  CallRecord record;
  EXPECT_FALSE(CallObserver({}, "9.9", log).begin("", record));
  constexpr int kCalls = 10'000;
  for (const double share : {0.0, 0.25, 1.0}) {
    const CallObserver observer = observer_of(share, log);
    int traced = 0;
    for (int i = 0; i < kCalls; ++i) {
      if (!observer.begin("", record)) continue;
      ++traced;
      EXPECT_EQ(record.trace_id.size(), 32u);
      EXPECT_TRUE(record.parent_id.empty());
    }
    // Ten standard deviations.
    EXPECT_NEAR(traced, share * kCalls, share == 0.25 ? 433 : 0);
  }
}

TEST(CallObserverTest, ATraceparentSaysWhetherItsCallIsTraced) {
  const Log log(LogLevel::kError, true, -1);
  const std::string parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-";
  CallRecord record;
  EXPECT_TRUE(observer_of(0, log).begin(parent + "01", record));
  EXPECT_EQ(record.trace_id, "0af7651916cd43dd8448eb211c80319c");
  EXPECT_EQ(record.parent_id, "b7ad6b7169203331");
  EXPECT_FALSE(observer_of(1, log).begin(parent + "00", record));
}

TEST(SpanExporterTest, WhatFindsNoRoomIsDroppedAndCounted) {
  const Log log(LogLevel::kError, true, -1);
  SpanExporter exporter(CollectorClient(read_collector("http://127.0.0.1:1")), spans_frame("9.9"),
                        log);
  // The thread may take some of them before they are too many.
  constexpr std::uint64_t kPut = 2 * SpanExporter::kMostCalls + SpanExporter::kRequestCalls;
  for (std::uint64_t i = 0; i < kPut; ++i) exporter.put({.json = "{}", .count = 3});
  EXPECT_GE(exporter.dropped(), 3 * SpanExporter::kRequestCalls);
  exporter.close();
  exporter.put({.json = "{}", .count = 3});
  // What close does not wait for comes later.
  const TimePoint patience = std::chrono::steady_clock::now() + std::chrono::minutes(5);
  while (exporter.dropped() < 3 * (kPut + 1) && std::chrono::steady_clock::now() < patience) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_EQ(exporter.dropped(), 3 * (kPut + 1));
  EXPECT_EQ(exporter.sent(), 0u);
}

}  // namespace
}  // namespace tessera
