// What the KServe protocol's ModelStatistics tells of a model, from the counters that the metrics
// page shows.
//
// Contract: free function; any thread; nothing blocks.
#pragma once

#include <cstdint>

#include "common/clock.h"
#include "metrics/model_metrics.h"

namespace tessera {

struct CountedTime {
  std::uint64_t count = 0;
  std::uint64_t ns = 0;
};

struct ModelStatistics {
  std::uint64_t last_inference_ms = 0;  // since 1970; 0: none yet
  std::uint64_t samples = 0;            // answered OK
  std::uint64_t batches = 0;
  CountedTime success;  // whole calls
  CountedTime fail;
  CountedTime queue;
  CountedTime compute_input;  // of each batch: its decoding, assembling and copying
  CountedTime compute_infer;
  CountedTime compute_output;  // splitting and encoding
};

// `now` is both clocks' at the same time: the server's, and the one that counts from 1970.
ModelStatistics statistics_of(const ModelMetrics& model, TimePoint now,
                              std::chrono::system_clock::time_point now_of_day);

}  // namespace tessera
