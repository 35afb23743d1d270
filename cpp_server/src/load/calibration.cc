#include "load/calibration.h"

#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <ctime>
#include <nlohmann/json.hpp>
#include <numeric>
#include <set>
#include <utility>
#include <vector>

#include "common/cpus.h"
#include "common/text.h"
#include "load/address.h"
#include "load/drawn_requests.h"
#include "load/server_counters.h"

namespace tessera {
namespace {

// Sizes of calls that are sent alone; those of a usual ranking request and below.
constexpr std::int64_t kSizes[] = {1, 4, 16, 64, 256};
// So many calls in flight for each CPU: with the first, batches are as small as under a load that a
// host is sized for, and rates are shares of what is answered then; with the last, no thread of the
// server has nothing to do.
constexpr int kDepths[] = {4, 32};
// A run is measured in so many windows, in turn with those of all others, and told by their
// medians. What an open loop meets differs from one second to the next, as the system leaves busy
// threads on one CPU for as long as that: of one run the 99th percentile may be ten times that of
// another. And a machine that others share is faster in one minute than in the next, which all runs
// then have alike.
constexpr int kWindows = 11;
// A window's part of a run's duration: the windows of a closed loop make one duration together,
// those of an open loop two, since it is the longest latencies that are wanted of them.
constexpr double kClosed = 1.0 / kWindows, kOpen = 2.0 / kWindows;
// A window in which nothing was answered, or in which the server had not yet counted what it
// answered, is measured again so often: that is what a short one may meet on a busy machine.
constexpr int kTries = 10;
// Equally likely durations of a pass, and latencies, that a run is told by.
constexpr int kQuantiles = 101;

double own_cpu_seconds() {
  rusage used{};
  ::getrusage(RUSAGE_SELF, &used);
  const auto of = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) / 1e6;
  };
  return of(used.ru_utime) + of(used.ru_stime);
}

std::vector<double> quantiles_us(const LatencyHistogram& times) {
  std::vector<double> found;
  found.reserve(kQuantiles);
  for (int i = 0; i < kQuantiles; ++i) {
    found.push_back(static_cast<double>(times.quantile_ns((i + 0.5) / kQuantiles)) / 1e3);
  }
  return found;
}

std::string now_text() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  ::gmtime_r(&now, &parts);
  char buffer[32];
  std::strftime(buffer, sizeof(buffer), "%Y-%m-%dT%H:%M:%SZ", &parts);
  return buffer;
}

// Ids of a sample, over all features.
std::int64_t ids_per_sample(const InputSchema& schema, const DrawOptions& draw) {
  const std::vector<std::int64_t>& bags = draw.ids_per_bag;
  if (bags.size() == 1) return bags[0] * static_cast<std::int64_t>(schema.features.size());
  return std::accumulate(bags.begin(), bags.end(), std::int64_t{0});
}

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

// One run made of windows of the same load, an odd number of them.
nlohmann::json median_of(const std::vector<nlohmann::json>& windows) {
  nlohmann::json found = windows.front();
  const auto all = [&](const auto& take) {
    std::vector<double> values;
    values.reserve(windows.size());
    for (const nlohmann::json& window : windows) values.push_back(take(window));
    return values;
  };
  for (const char* key :
       {"cores_used", "server_cpu_us", "client_cpu_us", "batch_requests", "batch_samples"}) {
    found[key] =
        median(all([&](const nlohmann::json& window) { return window.at(key).get<double>(); }));
  }
  for (const char* key : {"latency_us", "pass_us"}) {
    for (std::size_t i = 0; i < found[key].size(); ++i) {
      found[key][i] = median(
          all([&](const nlohmann::json& window) { return window.at(key).at(i).get<double>(); }));
    }
  }
  double seconds = 0, due = 0;
  std::int64_t calls = 0;
  for (const nlohmann::json& window : windows) {
    seconds += window.at("seconds").get<double>();
    due += window.at("rate").get<double>() * window.at("seconds").get<double>();
    calls += window.at("calls").get<std::int64_t>();
  }
  found["seconds"] = seconds;
  found["rate"] = due / seconds;
  found["calls"] = calls;
  return found;
}

class Measurement {
 public:
  Measurement(const TrafficOptions& traffic, const Address& http, const Manifest& manifest)
      : traffic_(traffic), http_(http), manifest_(manifest) {
    traffic_.read_every = 1;
  }

  // A window of calls as `draw` says, of which `in_flight` are under way.
  nlohmann::json closed(const DrawOptions& draw, int in_flight, int connections) {
    return window(draw, in_flight, 0, connections, kClosed);
  }

  // One of `rate` calls a second at random times.
  nlohmann::json open(const DrawOptions& draw, double rate, int connections) {
    return window(draw, 0, rate, connections, kOpen);
  }

 private:
  nlohmann::json window(const DrawOptions& draw, int in_flight, double rate, int connections,
                        double part) {
    const auto requests = drawn_requests(manifest_.schema, draw, traffic_.seed);
    TrafficOptions traffic = traffic_;
    traffic.in_flight = in_flight;
    traffic.rate = rate;
    traffic.poisson = true;
    traffic.connections = connections;
    traffic.warm_up = Duration::zero();
    traffic.duration = std::chrono::duration_cast<Duration>(part * traffic_.warm_up);
    if (traffic.duration > Duration::zero()) run_traffic(traffic, requests, draw.samples);
    traffic.duration = std::chrono::duration_cast<Duration>(part * traffic_.duration);
    for (int i = 1;; ++i) {
      const ServerCounters before = read_counters(http_, traffic.authorization);
      const double own_before = own_cpu_seconds();
      const TrafficResult result = run_traffic(traffic, requests, draw.samples);
      const double own = own_cpu_seconds() - own_before;
      const ServerCounters after = read_counters(http_, traffic.authorization);
      check(result, draw.samples);
      const double batches = after.batches - before.batches;
      if (result.latency.count() == 0 || !(batches > 0)) {
        if (i < kTries) continue;
        refuse(result, draw.samples);
      }
      const auto calls = static_cast<double>(result.latency.count());
      const double server = after.cpu_seconds - before.cpu_seconds;
      return {{"samples", draw.samples},
              {"in_flight", in_flight},
              {"rate", rate},
              {"connections", connections},
              {"seconds", result.seconds},
              {"calls", result.latency.count()},
              {"cores_used", (server + own) / result.seconds},
              {"server_cpu_us", 1e6 * server / calls},
              {"client_cpu_us", 1e6 * own / calls},
              {"batch_requests", (after.batch_requests - before.batch_requests) / batches},
              {"batch_samples", (after.batch_samples - before.batch_samples) / batches},
              {"latency_us", quantiles_us(result.latency)},
              {"pass_us", quantiles_us(result.passes)}};
    }
  }

  // Says why a window in which no call was answered, or no batch counted, has no costs.
  [[noreturn]] static void refuse(const TrafficResult& result, std::int64_t samples) {
    if (result.latency.count() == 0) {
      throw CalibrationError(text("no call of ", samples, " samples was answered in ",
                                  result.seconds, " s; give a longer --duration-s"));
    }
    throw CalibrationError(
        "the server at --http-address has counted no batch during a run: is it the one at "
        "--address?");
  }

  static void check(const TrafficResult& result, std::int64_t samples) {
    for (const auto& [code, count] : result.codes) {
      if (code != "OK") {
        throw CalibrationError(text(count, " calls of ", samples, " samples were answered with ",
                                    code, ": costs are those of calls that succeed"));
      }
    }
    if (result.answers_wrong_size > 0) {
      throw CalibrationError(text(result.answers_wrong_size, " answers did not have the ", samples,
                                  " scores that were asked for: does --model-file have what the "
                                  "server serves?"));
    }
  }

  TrafficOptions traffic_;
  const Address& http_;
  const Manifest& manifest_;
};

}  // namespace

std::string calibrate(const TrafficOptions& traffic, const std::string& http_address,
                      const Manifest& manifest, const DrawOptions& draw,
                      const std::vector<double>& loads) {
  const Address http = resolve(http_address, "http-address");
  const ServerCounters first = read_counters(http, traffic.authorization);
  Measurement measurement(traffic, http, manifest);
  std::set<std::int64_t> sizes(std::begin(kSizes), std::end(kSizes));
  sizes.insert(draw.samples);
  std::vector<std::vector<nlohmann::json>> windows(sizes.size() + std::size(kDepths) +
                                                   loads.size());
  const int cpus = available_cpus();
  for (int i = 0; i < kWindows; ++i) {
    auto run = windows.begin();
    for (const std::int64_t samples : sizes) {
      DrawOptions sized = draw;
      sized.samples = samples;
      (run++)->push_back(measurement.closed(sized, 1, 1));
    }
    const auto& rated_by = *run;
    for (const int depth : kDepths) {
      (run++)->push_back(measurement.closed(draw, depth * cpus, traffic.connections));
    }
    const nlohmann::json& found = rated_by.back();
    const double most = found.at("calls").get<double>() / found.at("seconds").get<double>();
    for (const double load : loads) {
      (run++)->push_back(measurement.open(draw, load * most, traffic.connections));
    }
  }
  nlohmann::json runs = nlohmann::json::array();
  for (const auto& of_run : windows) runs.push_back(median_of(of_run));
  const nlohmann::json costs = {
      {"kind", "tessera-costs"},
      {"format", 1},
      {"created", now_text()},
      {"server", {{"kind", first.server}, {"version", first.version}, {"cpus", cpus}}},
      {"model", {{"name", manifest.name}, {"version", manifest.version}}},
      {"samples", draw.samples},
      {"ids_per_sample", ids_per_sample(manifest.schema, draw)},
      {"runs", std::move(runs)}};
  return costs.dump(1) + "\n";
}

}  // namespace tessera
