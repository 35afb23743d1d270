#include "server/config.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <filesystem>
#include <iterator>
#include <set>
#include <sstream>

#include "common/cpus.h"
#include "common/text.h"
#include "package/format_rules.h"
#include "server/connection_flags.h"
#include "server/observe_flags.h"
#include "server/record_flags.h"
#include "server/security_flags.h"
#include "server/shared_memory_flags.h"

namespace tessera {
namespace {

constexpr int kWorkersPerGpu = 2;
constexpr double kMostPollS = 86'400;

// What stands before the first '=' is a name unless it holds a '/': then all of it is a path.
ModelSource parse_model(const std::string& value) {
  const auto equals = value.find('=');
  if (equals == std::string::npos || value.find('/') < equals) return {value, ""};
  if (equals == 0 || equals + 1 == value.size()) {
    refuse_flag("model", "'" + value + "'", "give MODEL.pt or NAME=MODEL.pt");
  }
  return {value.substr(equals + 1), value.substr(0, equals)};
}

std::string checked_repository(const std::string& value) {
  std::error_code trouble;
  const std::filesystem::directory_iterator readable(value, trouble);
  if (trouble) {
    refuse_flag("model-repository", "'" + value + "'",
                text("give a folder that can be read (", trouble.message(), ")"));
  }
  return value;
}

ModelControl parse_control(const std::string& value) {
  for (const auto control : {ModelControl::kNone, ModelControl::kPoll, ModelControl::kExplicit}) {
    if (value == control_name(control)) return control;
  }
  refuse_flag("model-control", "'" + value + "'", "give none, poll or explicit");
}

std::vector<int> parse_gpus(const std::string& value) {
  std::vector<int> gpus;
  std::istringstream parts(value);
  for (std::string part; std::getline(parts, part, ',');) {
    gpus.push_back(checked_number<int>("gpus", part, 0, 1'023));
  }
  std::set<int> distinct(gpus.begin(), gpus.end());
  if (gpus.empty() || distinct.size() != gpus.size()) {
    refuse_flag("gpus", "'" + value + "'", "give CUDA's numbers of GPUs, each once, as in 0,1");
  }
  return gpus;
}

std::string checked_operator(const std::string& value) {
  const auto colons = value.find("::");
  const auto is_word = [](const std::string& part) {
    return !part.empty() && std::all_of(part.begin(), part.end(), [](unsigned char c) {
      return c == '_' || (c < 128 && std::isalnum(c) != 0);
    });
  };
  if (colons == std::string::npos || !is_word(value.substr(0, colons)) ||
      !is_word(value.substr(colons + 2))) {
    refuse_flag("allow-op", "'" + value + "'", "give an operator's name such as aten::rand");
  }
  return value;
}

std::vector<Flag> own_flags(ServerConfig& config) {
  return {
      {"model", "[NAME=]MODEL.pt",
       "a package to serve, and the name that requests use for it (default: the name in the "
       "package); a name holds neither '=' nor '/', so that a path with '=' in its first part is "
       "written with ./ before it; may be given several times, the first one answers requests "
       "without a name",
       [&](const std::string& value) { config.models.push_back(parse_model(value)); },
       /*repeatable=*/true},
      {"model-repository", "DIR",
       "a folder of models, DIR/MODEL/VERSION/model.pt, all of which are served; may be given "
       "several times, beside --model (default: none)",
       [&](const std::string& value) { config.repositories.push_back(checked_repository(value)); },
       /*repeatable=*/true},
      {"model-control", "{none,poll,explicit}",
       "when the versions of --model-repository change: never, as its folders do, or as calls ask "
       "for (default: none)",
       [&](const std::string& value) { config.control = parse_control(value); }},
      {"poll-s", "S",
       text("how often --model-control poll reads the folders, seconds (default: ", config.poll_s,
            ")"),
       [&](const std::string& value) {
         config.poll_s = parse_number<double>("poll-s", value);
         if (!(config.poll_s > 0) || !(config.poll_s <= kMostPollS)) {
           refuse_flag("poll-s", value, text("give seconds above 0 and up to ", kMostPollS));
         }
       }},
      number_flag("max-model-bytes",
                  "what the files of a repository's loaded versions, and of the one that is being "
                  "loaded, may have in sum, bytes; 0: any number",
                  config.max_model_bytes, 0),
      {"follow", "",
       "take the commits that come into the folder log beside a package of --model-repository, "
       "while it answers (default: serve packages as they are)",
       [&](const std::string&) { config.follow = true; }},
      number_flag("follow-poll-ms", "how often --follow looks for commits, milliseconds",
                  config.follow_poll_ms, 1, 3'600'000),
      number_flag("rollback-bytes",
                  "what --follow keeps of what commits have replaced, of all versions together, so "
                  "that they can be taken back at once, bytes; 0: nothing, a version is loaded "
                  "again then",
                  config.rollback_bytes, 0),
      {"host", "HOST",
       text("address to listen on, for both ports (default: ", config.host,
            ", this machine alone; 0.0.0.0: every interface)"),
       [&](const std::string& value) { config.host = value; }},
      number_flag("port", "gRPC port; 0: any free one, see the ready line", config.port, 0, 65'535),
      {"grpc-socket", "PATH",
       "a Unix socket that answers gRPC as the port does, for clients on this machine, which call "
       "it unix:PATH; who may write to the file may connect, as the umask says (default: none)",
       [&](const std::string& value) {
         if (value.empty()) refuse_flag("grpc-socket", "''", "give a path, or leave it out");
         config.grpc_socket = value;
       }},
      number_flag("http-port", "HTTP port; 0: any free one", config.http_port, 0, 65'535),
      {"workers", "N",
       text("inference threads of each device, no more and no fewer (default: 2 on a GPU; on CPUs "
            "half of them, and as many as the other half that help while requests are heavy; here ",
            default_workers(), ")"),
       [&](const std::string& value) {
         config.workers = checked_number<int>("workers", value, 1, 4'096);
       }},
      {"gpus", "N[,N...]",
       "on which GPUs a package made for GPUs is served, the whole model on each (on as many as "
       "it has shards); default: on every one that is there",
       [&](const std::string& value) { config.gpus = parse_gpus(value); }},
      number_flag("threads-per-worker", "threads inside one forward pass",
                  config.threads_per_worker, 1, 4'096),
      number_flag("worker-niceness",
                  "nice levels by which inference stands back behind the network for a CPU",
                  config.worker_niceness, 0, 19),
      number_flag("max-batch-samples", "samples of a batch", config.batch_limits.max_samples, 1),
      number_flag("max-batch-ids", "ids of a batch", config.batch_limits.max_ids, 1),
      {"max-delay-us", "N",
       "how long a free worker waits for more requests, microseconds; 0: not at all "
       "(default: 0)",
       [&](const std::string& value) {
         config.batch_limits.max_delay = std::chrono::microseconds(
             checked_number<std::int64_t>("max-delay-us", value, 0, 60'000'000));
       }},
      number_flag("max-request-samples", "samples of a request", config.request_limits.max_samples,
                  1),
      number_flag("max-request-ids", "ids of a request", config.request_limits.max_ids, 1),
      number_flag("max-queue-requests", "requests that may wait", config.queue_limits.max_requests,
                  1),
      number_flag("max-queue-samples", "samples that may wait", config.queue_limits.max_samples, 1),
      number_flag("max-message-bytes", "largest message, bytes", config.max_message_bytes, 1'024),
      number_flag(
          "max-inflight-bytes",
          "what requests and answers inside the server may take, of all models together, bytes; "
          "messages that are still being received may take about as much again",
          config.max_inflight_bytes, 1'024, std::int64_t{1} << 50),
      number_flag("max-http-connections",
                  "connections of the HTTP port; a new one takes the place of the oldest without a "
                  "complete request",
                  config.max_http_connections, 1, 65'536),
      number_flag("drain-propagation-ms", "between NOT_SERVING and the first refusal, milliseconds",
                  config.drain_propagation_ms, 0),
      {"drain-limit-s", "S",
       text("what accepted requests may take after SIGTERM, seconds (default: ",
            config.drain_limit_s, ")"),
       [&](const std::string& value) {
         config.drain_limit_s = parse_number<double>("drain-limit-s", value);
       }},
      {"skip-golden", "",
       "do not replay the package's golden answers before serving (default: replay them)",
       [&](const std::string&) { config.verify_golden = false; }},
      {"allow-op", "NAME",
       "an operator that a package's graph may call beside those that every package may, such as "
       "aten::rand; may be given several times (default: none)",
       [&](const std::string& value) { config.allow_ops.push_back(checked_operator(value)); },
       /*repeatable=*/true},
      {"load-timeout-s", "S",
       text("what a package's own code may take while it is loaded (opened, optimized, warmed up, "
            "golden answers), seconds; then a version of a repository is refused, and for one of "
            "--model this process ends (default: ",
            config.load_timeout_s, ")"),
       [&](const std::string& value) {
         config.load_timeout_s = parse_number<double>("load-timeout-s", value);
       }},
      {"require-signature", "",
       "refuse a package that none of the --public-key keys has signed (default: serve it)",
       [&](const std::string&) { config.require_signature = true; }},
      {"public-key", "FILE",
       "PEM file with an Ed25519 public key that is trusted; may be given several times; for "
       "--require-signature",
       [&](const std::string& value) { config.public_keys.push_back(value); },
       /*repeatable=*/true},
      {"ops-dir", "DIR",
       "a folder with operator libraries, searched before the folders of TESSERA_OPS_DIR, this "
       "program's checkout and the packages beside the torch wheel; may be given several times",
       [&](const std::string& value) { config.ops_dirs.push_back(value); },
       /*repeatable=*/true, /*in_file=*/true, /*in_environment=*/false},
      {"log-level", "{debug,info,warning,error}", "debug has a line per request (default: info)",
       [&](const std::string& value) {
         const std::pair<const char*, LogLevel> levels[] = {{"debug", LogLevel::kDebug},
                                                            {"info", LogLevel::kInfo},
                                                            {"warning", LogLevel::kWarning},
                                                            {"error", LogLevel::kError}};
         for (const auto& [name, level] : levels) {
           if (value == name) {
             config.log_level = level;
             return;
           }
         }
         refuse_flag("log-level", "'" + value + "'", "give debug, info, warning or error");
       }},
      {"log-format", "{json,text}", "json: one object per line (default: json)",
       [&](const std::string& value) {
         if (value != "json" && value != "text") {
           refuse_flag("log-format", "'" + value + "'", "give json or text");
         }
         config.log_json = value == "json";
       }},
      {"config", "FILE.yaml",
       "a file with values of flags, by their names without dashes; a list for one that may be "
       "given "
       "several times, true or false for one without a value. TESSERA_<FLAG> in the environment is "
       "such a value, too (TESSERA_MAX_BATCH_SAMPLES=256; commas part those of a list). The "
       "command "
       "line wins over the environment, that over the file (default: none)",
       [&](const std::string& value) { config.config_file = value; }, /*repeatable=*/false,
       /*in_file=*/false},
      {"version", "", "print the version and exit",
       [&](const std::string&) { config.version = true; },
       /*repeatable=*/false, /*in_file=*/false, /*in_environment=*/false},
      {"help", "", "print this and exit", [&](const std::string&) { config.help = true; },
       /*repeatable=*/false, /*in_file=*/false, /*in_environment=*/false},
  };
}

std::vector<Flag> flags(ServerConfig& config) {
  std::vector<Flag> all = own_flags(config);
  for (std::vector<Flag> more :
       {observe_flags(config), record_flags(config), security_flags(config),
        shared_memory_flags(config), connection_flags(config.connections)}) {
    all.insert(all.end(), std::make_move_iterator(more.begin()),
               std::make_move_iterator(more.end()));
  }
  return all;
}

void check(const ServerConfig& config) {
  if (config.models.empty() && config.repositories.empty()) {
    throw UsageError("--model is missing; give at least one MODEL.pt, or --model-repository DIR");
  }
  const std::set<std::string> distinct(config.repositories.begin(), config.repositories.end());
  if (distinct.size() != config.repositories.size()) {
    refuse_flag("model-repository", "'" + config.repositories.back() + "'",
                "give each folder once");
  }
  if (config.repositories.empty() && config.control != ModelControl::kNone) {
    refuse_flag("model-control", std::string(control_name(config.control)),
                "there is nothing to control; add --model-repository DIR");
  }
  if (config.repositories.empty() && config.follow) {
    throw UsageError("--follow needs versions with logs of commits; add --model-repository DIR");
  }
  if (config.port == config.http_port && config.port != 0) {
    refuse_flag("http-port", text(config.http_port), "the gRPC port is the same: choose another");
  }
  if (config.queue_limits.max_samples < config.request_limits.max_samples) {
    refuse_flag("max-queue-samples", text(config.queue_limits.max_samples),
                text("a request of --max-request-samples ", config.request_limits.max_samples,
                     " could never wait in it: raise the one or lower the other"));
  }
  if (config.max_inflight_bytes < config.max_message_bytes) {
    refuse_flag("max-inflight-bytes", text(config.max_inflight_bytes),
                text("a message of --max-message-bytes ", config.max_message_bytes,
                     " could never come in: raise the one or lower the other"));
  }
  if (config.require_signature && config.public_keys.empty()) {
    throw UsageError("--require-signature needs to know whom to trust; give --public-key FILE");
  }
  if (!config.require_signature && !config.public_keys.empty()) {
    refuse_flag("public-key", config.public_keys.front(),
                "nothing is checked against it; add --require-signature");
  }
  check_security(config);
  check_observing(config);
  check_recording(config);
  // Written so that a NaN is refused.
  if (!(config.load_timeout_s > 0) || !(config.load_timeout_s <= kMaxLoadTimeoutS)) {
    refuse_flag("load-timeout-s", text(config.load_timeout_s),
                text("give seconds above 0 and up to ", kMaxLoadTimeoutS));
  }
  if (!(config.drain_limit_s * 1'000 > static_cast<double>(config.drain_propagation_ms)) ||
      !(config.drain_limit_s < 1e6)) {
    refuse_flag("drain-limit-s", text(config.drain_limit_s),
                text("it must be longer than --drain-propagation-ms ", config.drain_propagation_ms,
                     " and below 1000000"));
  }
}

}  // namespace

int default_workers() { return std::max(1, available_cpus() / 2); }

WorkerPlan plan_workers(const ServerConfig& config, bool on_cpu, int cpus) {
  if (config.workers > 0) return {.ordinary = config.workers, .spare = 0};
  if (!on_cpu) return {.ordinary = kWorkersPerGpu, .spare = 0};
  const int ordinary = std::max(1, cpus / 2);
  return {.ordinary = ordinary, .spare = cpus - ordinary};
}

http2::Limits connection_limits(const ServerConfig& config) {
  http2::Limits limits = config.connections;
  limits.max_message_bytes = config.max_message_bytes;
  limits.max_buffered_bytes = config.max_inflight_bytes;
  return limits;
}

ServerConfig parse_flags(const std::vector<std::string>& arguments,
                         const Environment& environment) {
  ServerConfig config;
  const std::vector<Flag> known = flags(config);
  FlagSources sources(known);
  const std::vector<GivenFlag> given = split_flags(known, arguments);
  for (const GivenFlag& one : given) {
    if (one.flag->name == "help" || one.flag->name == "version") one.flag->set("");
  }
  if (config.help || config.version) return config;
  sources.add_command_line(given);
  sources.add_environment(environment);
  sources.add_file();
  sources.set();
  try {
    check(config);
  } catch (const FlagError& error) {
    sources.rethrow(error);
  }
  return config;
}

std::string usage() {
  ServerConfig config;
  std::string out =
      "usage: tessera-server --model [NAME=]MODEL.pt | --model-repository DIR [flags]\n\n"
      "Answer requests for scores over gRPC for one or more packages, until SIGTERM.\n\n"
      "The gRPC port speaks predictor.Predictor, inference.GRPCInferenceService (KServe's v2\n"
      "protocol with Triton's extensions), grpc.health.v1.Health and server reflection;\n"
      "the HTTP port has /metrics (Prometheus), /healthz, /readyz and a status page at /. Log\n"
      "lines go to stderr; the line with \"event\": \"ready\" names both ports.\n\n"
      "SIGTERM or SIGINT: health turns NOT_SERVING at once, after --drain-propagation-ms new\n"
      "calls get UNAVAILABLE, every accepted request is answered, exit status 0. A repeat within\n"
      "a second is the same signal; a later one ends at once. SIGHUP reads certificates, tokens\n"
      "and the repository again, and opens the access log anew.\n\n"
      "Every flag can also be a key of the file of --config, or a variable TESSERA_<FLAG>:\n"
      "docs/settings.md.\n\n"
      "Exit status: 0 drained; 1 the drain limit passed or a second signal came with requests\n"
      "unanswered; 2 a flag, a package or a port has to be changed.\n\n"
      "flags:\n";
  out += flags_text(flags(config));
  return out;
}

}  // namespace tessera
