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
// With so many in flight no thread of the server has nothing to do, with 8 few.
constexpr int kDepths[] = {8, 64};
// Of what the server answers with the most in flight. With the least CPUs sleep between calls, and
// passes find colder caches than those of calls that follow one another; with the others threads
// wait for CPUs, as the system shares them.
constexpr double kShares[] = {0.25, 0.5, 0.75};
// Each of these runs is measured in so many windows, in turn with those of the others, and told by
// their medians. What an open loop meets differs from one second to the next, as the system leaves
// busy threads on one CPU for as long as that: of one run the 99th percentile may be ten times that
// of another.
constexpr int kWindows = 5;
constexpr double kWindow = 0.4;  // of a run's duration
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
  double seconds = 0;
  std::int64_t calls = 0;
  for (const nlohmann::json& window : windows) {
    seconds += window.at("seconds").get<double>();
    calls += window.at("calls").get<std::int64_t>();
  }
  found["seconds"] = seconds;
  found["calls"] = calls;
  return found;
}

class Measurement {
 public:
  Measurement(const TrafficOptions& traffic, const Address& http, const Manifest& manifest)
      : traffic_(traffic), http_(http), manifest_(manifest) {
    traffic_.warm_up = Duration::zero();
    traffic_.read_every = 1;
  }

  // A run of calls as `draw` says, of which `in_flight` are under way.
  nlohmann::json run(const DrawOptions& draw, int in_flight, int connections, Duration warm_up) {
    return run(draw, in_flight, 0, connections, warm_up);
  }

  // The same with calls at random times, a run for each of `rates`, calls a second.
  std::vector<nlohmann::json> runs_at(const DrawOptions& draw, const std::vector<double>& rates,
                                      int connections, Duration warm_up) {
    const Duration whole = traffic_.duration;
    traffic_.duration = std::chrono::duration_cast<Duration>(kWindow * whole);
    std::vector<std::vector<nlohmann::json>> windows(rates.size());
    for (int i = 0; i < kWindows; ++i) {
      for (std::size_t r = 0; r < rates.size(); ++r) {
        windows[r].push_back(run(draw, 0, rates[r], connections, warm_up));
      }
    }
    traffic_.duration = whole;
    std::vector<nlohmann::json> found;
    found.reserve(windows.size());
    for (const auto& of_rate : windows) found.push_back(median_of(of_rate));
    return found;
  }

 private:
  nlohmann::json run(const DrawOptions& draw, int in_flight, double rate, int connections,
                     Duration warm_up) {
    const auto requests = drawn_requests(manifest_.schema, draw, traffic_.seed);
    traffic_.in_flight = in_flight;
    traffic_.rate = rate;
    traffic_.poisson = true;
    traffic_.connections = connections;
    const Duration duration = traffic_.duration;
    traffic_.duration = warm_up;
    if (warm_up > Duration::zero()) run_traffic(traffic_, requests, draw.samples);
    traffic_.duration = duration;
    const ServerCounters before = read_counters(http_, traffic_.authorization);
    const double own_before = own_cpu_seconds();
    const TrafficResult result = run_traffic(traffic_, requests, draw.samples);
    const double own = own_cpu_seconds() - own_before;
    const ServerCounters after = read_counters(http_, traffic_.authorization);
    check(result, draw.samples);
    const auto calls = static_cast<double>(result.latency.count());
    const double server = after.cpu_seconds - before.cpu_seconds;
    const double batches = after.batches - before.batches;
    if (!(batches > 0)) {
      throw CalibrationError(
          "the server at --http-address has counted no batch during a run: is "
          "it the one at --address?");
    }
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

  static void check(const TrafficResult& result, std::int64_t samples) {
    for (const auto& [code, count] : result.codes) {
      if (code != "OK") {
        throw CalibrationError(text(count, " calls of ", samples, " samples were answered with ",
                                    code, ": costs are those of calls that succeed"));
      }
    }
    if (result.latency.count() == 0) {
      throw CalibrationError(text("no call of ", samples, " samples was answered in ",
                                  result.seconds, " s; give a longer --duration-s"));
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
                      const Manifest& manifest, const DrawOptions& draw) {
  const Address http = resolve(http_address, "http-address");
  const ServerCounters first = read_counters(http, traffic.authorization);
  Measurement measurement(traffic, http, manifest);
  nlohmann::json runs = nlohmann::json::array();
  std::set<std::int64_t> sizes(std::begin(kSizes), std::end(kSizes));
  sizes.insert(draw.samples);
  for (const std::int64_t samples : sizes) {
    DrawOptions sized = draw;
    sized.samples = samples;
    runs.push_back(measurement.run(sized, 1, 1, traffic.warm_up));
  }
  for (const int depth : kDepths) {
    runs.push_back(measurement.run(draw, depth, traffic.connections, traffic.warm_up));
  }
  const nlohmann::json& busiest = runs.back();
  const double most = busiest.at("calls").get<double>() / busiest.at("seconds").get<double>();
  std::vector<double> rates;
  for (const double share : kShares) rates.push_back(share * most);
  for (auto& run : measurement.runs_at(draw, rates, traffic.connections, traffic.warm_up)) {
    runs.push_back(std::move(run));
  }
  const nlohmann::json costs = {
      {"kind", "tessera-costs"},
      {"format", 1},
      {"created", now_text()},
      {"server", {{"kind", first.server}, {"version", first.version}, {"cpus", available_cpus()}}},
      {"model", {{"name", manifest.name}, {"version", manifest.version}}},
      {"samples", draw.samples},
      {"ids_per_sample", ids_per_sample(manifest.schema, draw)},
      {"runs", std::move(runs)}};
  return costs.dump(1) + "\n";
}

}  // namespace tessera
