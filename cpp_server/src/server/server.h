// The server's life: open the ports, load, answer, drain, stop.
//
// Contract: made and run by the main thread, after block_signals; run blocks until a signal
// has come and the drain is over.
#pragma once

#include <atomic>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "common/clock.h"
#include "front/admission.h"
#include "front/byte_budget.h"
#include "front/grpc_front.h"
#include "front/http_front.h"
#include "front/predict_service.h"
#include "front/recent_requests.h"
#include "front/rest_service.h"
#include "front/server_facts.h"
#include "front/status_page.h"
#include "metrics/metrics_page.h"
#include "model/kept_packages.h"
#include "model/registry.h"
#include "observe/call_observer.h"
#include "package/signature.h"
#include "repository/manager.h"
#include "security/security.h"
#include "server/config.h"
#include "server/heap_trimmer.h"
#include "server/log.h"
#include "server/package_trial.h"
#include "server/signals.h"

namespace tessera {

class Server {
 public:
  // Reads the trusted keys, the tokens and every package's manifest, and opens the access log.
  // Throws PackageError, or UsageError when two models have the same name or a file has to be
  // changed.
  Server(const ServerConfig& config, const Log& log);
  ~Server();
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  // Serves until SIGTERM or SIGINT, then drains, also where loads of the start are going on and
  // some model answers already; another one a second later ends at once. SIGHUP reads the files of
  // secrets and the repository again, and opens the access log anew. Returns the exit status: 0
  // when every accepted request was answered, else 1. Throws UsageError or PackageError when a port
  // cannot be had or a package not be served.
  int run();

 private:
  struct Names {
    std::vector<std::string> names;
    std::vector<std::string> versions;
  };
  enum class Loading { kRuns, kDone, kFailed };

  static Names read_names(const ServerConfig& config);
  std::string state() const;
  ServerFacts facts() const;
  HttpAnswer page(const std::string& path) const;
  std::shared_ptr<HttpCall> post(HttpRequest request, HttpDone done);
  void open();
  void load();
  // Tells whether a call is being answered, as long as this server is there.
  std::function<bool()> answering() const;
  void load_all();
  void begin_to_serve();
  // Health checks see whether `model` answers; a server that drains serves nothing.
  void tell_serving(const std::string& model, bool serving);
  std::unique_ptr<RepositoryManager> make_manager();
  std::optional<int> wait_for_stop(TimePoint until);
  void reload(int signal);
  bool drain();
  void close();

  const ServerConfig& config_;
  const Log& log_;
  SteadyClock clock_;
  const std::vector<PublicKey> trusted_;
  PackageTrials trials_{config_};  // of versions of repositories
  KeptPackages kept_;              // of them, too
  SignalWaiter signal_waiter_;
  SignalReader signals_;
  Names names_;
  Admission admission_;
  ByteBudget budget_;
  ModelList counters_;
  ModelMetrics unresolved_{"", ""};
  Registry registry_;
  http2::Counters connections_;
  SecurityMetrics security_metrics_;
  Security security_;
  CallObserver observer_;
  MetricsPage metrics_page_;
  mutable ShadowList shadows_;  // forgets, when it is shown, what has gone
  RecentRequests recent_;       // of models of repositories
  StatusPage status_page_;
  HeapTrimmer heap_;                                   // the HTTP thread's
  std::unique_ptr<RepositoryManager> repository_;      // null: no --model-repository was given
  const std::unique_ptr<SharedMemory> shared_memory_;  // null: no --shared-memory was given
  PredictContext context_;
  GrpcFront grpc_;
  std::unique_ptr<RestService> rest_;
  std::unique_ptr<HttpFront> http_;
  std::atomic<bool> draining_ = false;
  std::atomic<Loading> loading_ = Loading::kRuns;
  std::exception_ptr load_failure_;  // written before loading_ turns kFailed
  std::thread loader_;
  int port_ = 0;
};

}  // namespace tessera
