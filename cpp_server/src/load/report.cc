#include "load/report.h"

#include <cstdio>

#include "common/text.h"

namespace tessera {
namespace {

std::string fixed(double value, int digits) {
  char buffer[64];
  std::snprintf(buffer, sizeof(buffer), "%.*f", digits, value);
  return buffer;
}

std::string milliseconds(std::uint64_t nanoseconds) {
  return fixed(static_cast<double>(nanoseconds) / 1e6, 3);
}

double per_second(const TrafficResult& result) {
  return static_cast<double>(result.latency.count()) / result.seconds;
}

std::uint64_t failures(const TrafficResult& result) {
  std::uint64_t count = result.answers_wrong_size;
  for (const auto& [code, seen] : result.codes) {
    if (code != "OK") count += seen;
  }
  return count;
}

std::string load(const TrafficOptions& options) {
  if (options.schedule != nullptr) {
    return text("replay of ", options.schedule->size(), " requests at their recorded times");
  }
  if (options.rate == 0) return text("closed loop, ", options.in_flight, " in flight");
  return text("open loop, ", fixed(options.rate, 0), " requests/s, ",
              options.poisson ? "Poisson" : "constant");
}

}  // namespace

std::string text_report(const TrafficOptions& options, const TrafficResult& result) {
  const LatencyHistogram& latency = result.latency;
  std::string out = text(load(options), ", ", options.connections, " connections, ",
                         fixed(result.seconds, 1), " s\n");
  out += text("answered   ", latency.count(), " requests, ", fixed(per_second(result), 1),
              " requests/s\n");
  for (const auto& [code, count] : result.codes) {
    if (code != "OK") out += text("           ", count, " ", code, "\n");
  }
  if (result.answers_wrong_size > 0) {
    out += text("           ", result.answers_wrong_size, " answers of the wrong size\n");
  }
  out += text("latency ms p50 ", milliseconds(latency.quantile_ns(0.5)), "  p90 ",
              milliseconds(latency.quantile_ns(0.9)), "  p99 ",
              milliseconds(latency.quantile_ns(0.99)), "  p99.9 ",
              milliseconds(latency.quantile_ns(0.999)), "  max ", milliseconds(latency.max_ns()),
              "\n");
  if (result.batch_samples > 0) {
    out += text("server     queue ", fixed(result.server_queue_us, 0), " us, forward ",
                fixed(result.server_forward_us, 0), " us, ", fixed(result.batch_samples, 1),
                " samples per batch (means over the answers)\n");
  }
  return out;
}

std::string csv_header() {
  return "rate,in_flight,connections,seconds,answered,failed,requests_per_second,p50_ms,p90_ms,"
         "p99_ms,p999_ms,max_ms,queue_us,forward_us,batch_samples\n";
}

std::string csv_line(const TrafficOptions& options, const TrafficResult& result) {
  const LatencyHistogram& latency = result.latency;
  return text(fixed(options.rate, 1), ",",
              options.rate > 0 || options.schedule != nullptr ? 0 : options.in_flight, ",",
              options.connections, ",", fixed(result.seconds, 3), ",", latency.count(), ",",
              failures(result), ",", fixed(per_second(result), 1), ",",
              milliseconds(latency.quantile_ns(0.5)), ",", milliseconds(latency.quantile_ns(0.9)),
              ",", milliseconds(latency.quantile_ns(0.99)), ",",
              milliseconds(latency.quantile_ns(0.999)), ",", milliseconds(latency.max_ns()), ",",
              fixed(result.server_queue_us, 1), ",", fixed(result.server_forward_us, 1), ",",
              fixed(result.batch_samples, 2), "\n");
}

}  // namespace tessera
