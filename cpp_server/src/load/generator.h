// Sends requests and measures their latency.
//
// Open loop: requests leave at times decided beforehand (a constant rate or a Poisson
// process), however late the answers are, and a latency counts from the intended time. A
// generator that waits for answers before it sends would pause exactly when the server is
// slow and so not see it ("coordinated omission"). Closed loop: a fixed number of requests is
// always in flight, which measures the throughput at that depth, not the latency under a load.
//
// Contract: run blocks for the whole measurement and uses one thread per connection. The
// requests are shared and not changed.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "common/clock.h"
#include "load/latency_histogram.h"
#include "security/certificates.h"

namespace tessera {

class CallRecord;

struct TrafficOptions {
  std::string address;
  std::string method = "/predictor.Predictor/Predict";
  double rate = 0;      // requests/s over all connections; 0: closed loop
  bool poisson = true;  // else evenly spaced
  int in_flight = 64;   // closed loop: over all connections; open loop: unlimited
  int connections = 1;
  Duration warm_up{std::chrono::seconds(1)};  // not measured
  Duration duration{std::chrono::seconds(10)};
  Duration timeout{std::chrono::seconds(5)};
  std::uint64_t seed = 0;
  int read_every = 16;        // answers of which one is read for the means below
  std::string authorization;  // of each call; empty: none
  TlsFiles tls;               // no authorities: connections are not encrypted
  // Each request's own method; null: all have the one above. Both vectors outlive the run.
  const std::vector<std::string_view>* methods = nullptr;
  // When each request is sent, once, in this order, after the begin; all of them are measured.
  // Null: requests are sent in turn, by the rate or in a closed loop.
  const std::vector<Duration>* schedule = nullptr;
  CallRecord* record = nullptr;  // told of each measured call; outlives the run
};

struct TrafficResult {
  LatencyHistogram latency;                    // of answered requests
  LatencyHistogram passes;                     // of the answers that were read, as the server says
  std::map<std::string, std::uint64_t> codes;  // by status name, measured requests only
  std::uint64_t answers_wrong_size = 0;
  double seconds = 0;        // of the measurement
  double batch_samples = 0;  // mean over the answers, as the server reports it
  double server_forward_us = 0;
  double server_queue_us = 0;
};

// `requests` are sent in turn; each answer must be a PredictionResponse of `samples` samples, or is
// not looked at where `samples` is 0.
TrafficResult run_traffic(const TrafficOptions& options, const std::vector<std::string>& requests,
                          std::int64_t samples);

}  // namespace tessera
