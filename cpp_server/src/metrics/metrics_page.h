// The server's metrics page: every model's counters and the process's own figures in
// Prometheus' text format. Names, labels and buckets are those of Tessera's other server.
//
// Contract: the models, the logs and the counters are borrowed and outlive this. render may be
// called from any thread and reads /proc.
#pragma once

#include <string>

#include "http2/limits.h"
#include "metrics/model_list.h"
#include "metrics/model_metrics.h"
#include "metrics/security_metrics.h"
#include "metrics/shadow_list.h"
#include "observe/call_observer.h"
#include "repository/control.h"
#include "server/log.h"

namespace tessera {

class MetricsPage {
 public:
  // `unresolved` counts requests that name no known model; it is shown only where it is not 0.
  MetricsPage(const ModelList& models, const ModelMetrics& unresolved, const Log& log,
              const http2::Counters& connections, const SecurityMetrics& security,
              std::string server_version, const CallObserver& observer);

  // Text format, version 0.0.4. `repository` may be null: there is none. `shadows` forgets those
  // whose versions it does not hold any more.
  std::string render(const RepositoryControl* repository, ShadowList& shadows) const;

 private:
  const ModelList& models_;
  const ModelMetrics& unresolved_;
  const Log& log_;
  const http2::Counters& connections_;
  const SecurityMetrics& security_;
  std::string server_version_;
  const CallObserver& observer_;
};

}  // namespace tessera
