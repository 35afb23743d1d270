// What an operator may set, with its unit and its default: the same flags as `tessera serve`.
//
// Contract: plain values. parse_flags has no side effects and throws UsageError, whose text is
// one line that names the flag, the value and the remedy.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "batching/policy.h"
#include "batching/request_queue.h"
#include "common/flags.h"
#include "http2/limits.h"
#include "observe/observer_options.h"
#include "package/format_rules.h"
#include "repository/control.h"
#include "request/decoder.h"
#include "server/flag_sources.h"

namespace tessera {

// A package to serve; an empty name stands for the name in its manifest.
struct ModelSource {
  std::string path;
  std::string name;
};

enum class LogLevel { kDebug, kInfo, kWarning, kError };

// Half of the CPUs (common/cpus.h), at least one: event loops of the network, and workers while
// requests are small.
int default_workers();

struct ServerConfig {
  std::vector<ModelSource> models;        // the first one answers requests that name no model
  std::vector<std::string> repositories;  // folders of models (docs/repository.md)
  ModelControl control = ModelControl::kNone;
  double poll_s = 2;
  std::int64_t max_model_bytes = 0;   // of the files of loaded versions; 0: any number
  bool follow = false;                // the logs of the repositories' versions
  std::int64_t follow_poll_ms = 200;  // how often they are looked at
  std::int64_t rollback_bytes = std::int64_t{256} << 20;  // of what commits have replaced
  std::string host = "127.0.0.1";
  int port = 50051;         // 0: any free one
  std::string grpc_socket;  // a Unix socket that answers gRPC, too; empty: none
  int http_port = 8002;     // 0: any free one
  RequestLimits request_limits;
  BatchLimits batch_limits;
  QueueLimits queue_limits;
  int workers = 0;        // of each device; 0: see plan_workers
  std::vector<int> gpus;  // for packages made for GPUs; empty: every one
  int threads_per_worker = 1;
  // Nice levels of workers behind the threads of the network. A worker that is busy all the time
  // and weighs less than other threads is left waiting behind one of them, while another CPU idles.
  int worker_niceness = 0;
  int max_message_bytes = 64 * 1024 * 1024;
  std::int64_t max_inflight_bytes = std::int64_t{1} << 30;  // of all models together
  int max_http_connections = 128;
  bool shared_memory = false;  // may be registered by clients (request/shared_memory.h)
  std::int64_t max_shared_memory_bytes = std::int64_t{1} << 30;
  // Limits of the gRPC port's connections; connection_limits() adds those of messages above.
  http2::Limits connections;
  std::int64_t drain_propagation_ms = 1'000;
  double drain_limit_s = 25.0;  // Kubernetes ends a container after 30
  bool verify_golden = true;
  std::vector<std::string> allow_ops;  // that a graph may call beside those of every package
  double load_timeout_s = kDefaultLoadTimeoutS;
  bool require_signature = false;
  std::vector<std::string> public_keys;    // PEM files
  std::vector<std::string> allowed_hosts;  // by which browsers may ask (front/host_rule.h)
  std::string auth_token_file;             // empty: callers need no token
  std::string tls_cert;                    // PEM files; empty: connections are not encrypted
  std::string tls_key;
  std::string tls_client_ca;  // empty: clients need no certificate
  LogLevel log_level = LogLevel::kInfo;
  bool log_json = true;
  ObserverOptions observer;
  std::vector<std::string> ops_dirs;
  std::string config_file;  // of --config; empty: none
  bool help = false;
  bool version = false;
};

// The workers of one model: `ordinary` of each device, and `spare` ones of the CPU, which take part
// in heavy work (batching/policy.h).
struct WorkerPlan {
  int ordinary = 1;
  int spare = 0;
};

// --workers and no spare ones where it was given. Otherwise two of each GPU; on the CPU half of the
// CPUs, and the other half in spare.
WorkerPlan plan_workers(const ServerConfig& config, bool on_cpu, int cpus);

// The limits of the gRPC port's connections.
http2::Limits connection_limits(const ServerConfig& config);

// `arguments` are those after the program's name; server/flag_sources.h says what `environment` and
// the file of --config add. With --help or --version nothing else is checked.
ServerConfig parse_flags(const std::vector<std::string>& arguments,
                         const Environment& environment = {});

// The text of --help.
std::string usage();

}  // namespace tessera
