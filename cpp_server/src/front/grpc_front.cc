#include "front/grpc_front.h"

#include <sys/resource.h>

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "front/health_service.h"
#include "front/kserve_service.h"
#include "front/message_method.h"
#include "front/reflection_service.h"
#include "front/scoring_call.h"
#include "front/socket.h"
#include "front/socket_file.h"
#include "http2/server.h"

namespace tessera {
namespace {

// Descriptors that the rest of the server may need beside its connections.
constexpr std::int64_t kOtherDescriptors = 64;
constexpr std::int64_t kLeastConnections = 16;

// No more connections than there are descriptors for, beside those of regions in `memory`.
http2::Limits within_the_systems(http2::Limits limits, const SharedMemory* memory) {
  rlimit open_files{};
  if (::getrlimit(RLIMIT_NOFILE, &open_files) != 0 || open_files.rlim_cur == RLIM_INFINITY) {
    return limits;
  }
  const std::int64_t others =
      kOtherDescriptors + (memory == nullptr ? 0 : memory->limits().descriptors);
  const std::int64_t room =
      std::max(kLeastConnections, static_cast<std::int64_t>(open_files.rlim_cur) - others);
  limits.max_connections = static_cast<int>(std::min<std::int64_t>(limits.max_connections, room));
  return limits;
}

}  // namespace

struct GrpcFront::State {
  State(const PredictContext& given, ServerFacts facts, http2::Counters& its_counters)
      : context(given),
        metadata(std::move(facts)),
        counters(its_counters),
        health(given.registry.names()) {}

  void add_methods(std::size_t loop) {
    http2::MethodTable& table = server->methods(loop);
    table.add("/predictor.Predictor/Predict",
              make_scoring_method(context, *server, loop, &make_predict_protocol));
    table.add("/inference.GRPCInferenceService/ModelInfer",
              make_scoring_method(context, *server, loop, [memory = context.shared_memory] {
                return make_infer_protocol(memory);
              }));
    add_kserve_methods(metadata, table);
    health.add_to(server->loop(loop), table);
    add_reflection_methods(table);
  }

  const PredictContext& context;
  const KserveMetadata metadata;
  http2::Counters& counters;
  HealthService health;
  http2::Limits limits;
  std::vector<ListeningSocket> sockets;
  std::optional<SocketFile> socket_file;
  std::optional<http2::Server> server;
};

GrpcFront::GrpcFront(const PredictContext& context, ServerFacts facts, http2::Counters& counters)
    : state_(std::make_unique<State>(context, std::move(facts), counters)) {}

GrpcFront::~GrpcFront() {
  stop(Duration::zero());
  release();
}

int GrpcFront::start(const GrpcOptions& options, int threads) {
  State& state = *state_;
  state.limits = within_the_systems(options.limits, state.context.shared_memory);
  state.sockets = ListeningSocket::on_every_address(options.host, options.port, "gRPC", "--port");
  if (!options.socket_file.empty()) state.socket_file.emplace(options.socket_file, "--grpc-socket");
  state.server.emplace(state.limits, state.counters, threads, options.gate, options.tls);
  for (std::size_t i = 0; i < state.server->loops(); ++i) state.add_methods(i);
  std::vector<int> descriptors;
  for (const ListeningSocket& socket : state.sockets) descriptors.push_back(socket.descriptor());
  if (state.socket_file) descriptors.push_back(state.socket_file->descriptor());
  state.server->start(descriptors);
  return state.sockets.front().port();
}

void GrpcFront::set_serving(const std::string& service, bool serving) {
  state_->health.set(service, serving);
}

void GrpcFront::forget(const std::string& service) { state_->health.forget(service); }

void GrpcFront::announce_end() {
  if (state_->server.has_value()) state_->server->announce_end();
}

void GrpcFront::stop(Duration grace) {
  if (!state_->server.has_value()) return;
  const TimePoint until = std::chrono::steady_clock::now() + grace;
  state_->health.close();
  state_->server->stop(until);
}

void GrpcFront::release() {
  state_->server.reset();
  state_->sockets.clear();
  state_->socket_file.reset();
}

}  // namespace tessera
