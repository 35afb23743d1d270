// The process's own figures, under the names that every Prometheus client library uses:
// https://prometheus.io/docs/instrumenting/writing_clientlibs/#process-metrics
//
// Contract: reads /proc; a figure that cannot be read is left out. Any thread.
#pragma once

#include <string>
#include <vector>

namespace tessera {

struct ProcessMetric {
  std::string name;
  std::string help;
  bool counter = false;  // else a gauge
  double value = 0;
};

std::vector<ProcessMetric> process_metrics();

}  // namespace tessera
