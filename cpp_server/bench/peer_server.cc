// What the benchmark holds tessera-server against, in one program:
//
//   peer_server sync MODEL.pt      gRPC's synchronous API, one request per forward, no batching
//   peer_server no-model MODEL.pt  tessera-server's own front end and batching with a model that
//                                  answers zeros at once: the ceiling of everything around it
//
// Prints its port and serves until it is killed. Not a server for anything else.
#include <grpcpp/grpcpp.h>

#include <iostream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "batching/merger.h"
#include "batching/pending_request.h"
#include "common/grpc_setup.h"
#include "front/grpc_front.h"
#include "model/loader.h"
#include "model/operator_libraries.h"
#include "model/registry.h"
#include "model/served_model.h"
#include "predictor.grpc.pb.h"
#include "request/decoder.h"

namespace {

using namespace tessera;

class ZeroScores final : public Scores {
 public:
  explicit ZeroScores(std::size_t count) : values_(count) {}
  std::span<const float> output(std::size_t) const override { return values_; }

 private:
  std::vector<float> values_;
};

// The model's own session with the model left out.
class NoModelSession final : public Session {
 public:
  explicit NoModelSession(std::unique_ptr<Session> real) : real_(std::move(real)) {}
  void begin_thread(int threads) override { real_->begin_thread(threads); }
  HostBatch reserve(const BatchShape& shape) override { return real_->reserve(shape); }
  std::size_t bytes() const override { return real_->bytes(); }
  std::unique_ptr<Scores> forward(const HostBatch& batch) override {
    return std::make_unique<ZeroScores>(static_cast<std::size_t>(batch.samples));
  }

 private:
  const std::unique_ptr<Session> real_;
};

class NoModel final : public Runner {
 public:
  explicit NoModel(std::unique_ptr<Runner> real) : real_(std::move(real)) {}
  std::vector<std::string> devices() const override { return real_->devices(); }
  std::vector<DeviceMemory> memory() const override { return real_->memory(); }
  std::unique_ptr<Session> open_session(std::size_t device) override {
    return std::make_unique<NoModelSession>(real_->open_session(device));
  }

 private:
  const std::unique_ptr<Runner> real_;
};

// A request of the sync server: it never waits, so that it is answered by nobody.
class Direct final : public PendingRequest {
  void answer(std::span<const OutputView>, const StageTimings&) override {}
  void fail(const Refusal&) override {}
};

class SyncService final : public predictor::Predictor::Service {
 public:
  explicit SyncService(LoadedPackage package)
      : package_(std::move(package)), decoder_(package_.manifest.schema, {}) {}

 private:
  grpc::Status Predict(grpc::ServerContext*, const predictor::PredictionRequest* message,
                       predictor::PredictionResponse* response) override {
    // gRPC's threads come and go; each computes with itself alone.
    thread_local std::unique_ptr<Session> session;
    if (session == nullptr) {
      session = package_.runner->open_session(0);
      session->begin_thread(1);
    }
    const std::string bytes = message->SerializeAsString();
    PredictionRequestView view;
    Direct direct;
    parse_request(std::as_bytes(std::span(bytes)), view);
    const Status status = decoder_.decode(view, direct.request);
    if (!status.ok()) return {static_cast<grpc::StatusCode>(status.code), status.message};
    Merger merger(package_.manifest.schema);
    const std::vector<Part> parts =
        cut_request(direct, 1, direct.request.samples, direct.request.ids);
    const auto scores = session->forward(merger.merge(parts, *session));
    auto& data = *(*response->mutable_predictions())[package_.manifest.schema.outputs[0].name]
                      .mutable_data();
    const auto values = scores->output(0);
    data.Add(values.begin(), values.end());
    return grpc::Status::OK;
  }

  const LoadedPackage package_;
  const RequestDecoder decoder_;
};

LoadedPackage load(const std::string& path) {
  return load_package(path, {.verify_golden = false, .library_folders = library_folders({})});
}

void serve_sync(const std::string& path) {
  prepare_grpc();
  SyncService service(load(path));
  grpc::ServerBuilder builder;
  int port = 0;
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
  builder.RegisterService(&service);
  const auto server = builder.BuildAndStart();
  std::cout << port << std::endl;
  server->Wait();
}

void serve_no_model(const std::string& path) {
  LoadedPackage package = load(path);
  package.runner = std::make_unique<NoModel>(std::move(package.runner));
  ServerConfig config;
  config.models = {{.path = path, .name = ""}};
  const SteadyClock clock;
  const Log log(LogLevel::kWarning, true);
  const std::string name = package.manifest.name;
  const auto metrics = std::make_shared<ModelMetrics>(name, package.manifest.version);
  ModelMetrics unresolved("", "");
  Registry registry({name});
  Admission admission([] {});
  ByteBudget budget(config.max_inflight_bytes);
  const PredictContext context{registry, unresolved, admission, budget, clock, log};
  http2::Counters counters;
  GrpcFront front(context, {registry, clock, "peer", [] { return false; }}, counters);
  registry.publish(name,
                   std::make_shared<ServedModel>(std::move(package), config, metrics, clock, log));
  std::cout << front.start({.host = "127.0.0.1", .limits = connection_limits(config)},
                           default_workers())
            << std::endl;
  while (true) std::this_thread::sleep_for(std::chrono::hours(1));
}

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc == 3 ? argv[1] : "";
  if (mode == "sync") {
    serve_sync(argv[2]);
  } else if (mode == "no-model") {
    serve_no_model(argv[2]);
  } else {
    std::cerr << "usage: peer_server sync|no-model MODEL.pt\n";
    return 2;
  }
}
