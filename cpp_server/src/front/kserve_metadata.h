// What the KServe protocol and Triton's extensions of it ask of a server and its models, without
// gRPC: every call of inference.GRPCInferenceService but ModelInfer.
//
// Contract: any thread; nothing blocks. What `facts` refers to outlives KserveMetadata. A refusal
// leaves the response in no particular state. Compiled against protobuf alone.
#pragma once

#include <utility>

#include "common/status.h"
#include "front/server_facts.h"
#include "inference.pb.h"

namespace tessera {

class KserveMetadata {
 public:
  explicit KserveMetadata(ServerFacts facts) : facts_(std::move(facts)) {}

  Status answer(const inference::ServerLiveRequest& request,
                inference::ServerLiveResponse& response) const;
  Status answer(const inference::ServerReadyRequest& request,
                inference::ServerReadyResponse& response) const;
  Status answer(const inference::ModelReadyRequest& request,
                inference::ModelReadyResponse& response) const;
  Status answer(const inference::ServerMetadataRequest& request,
                inference::ServerMetadataResponse& response) const;
  Status answer(const inference::ModelMetadataRequest& request,
                inference::ModelMetadataResponse& response) const;
  Status answer(const inference::ModelConfigRequest& request,
                inference::ModelConfigResponse& response) const;
  Status answer(const inference::ModelStatisticsRequest& request,
                inference::ModelStatisticsResponse& response) const;
  Status answer(const inference::RepositoryIndexRequest& request,
                inference::RepositoryIndexResponse& response) const;

  // Whether the next three may be called: there is shared memory.
  bool has_shared_memory() const { return facts_.shared_memory != nullptr; }
  Status answer(const inference::SystemSharedMemoryStatusRequest& request,
                inference::SystemSharedMemoryStatusResponse& response) const;
  Status answer(const inference::SystemSharedMemoryRegisterRequest& request,
                inference::SystemSharedMemoryRegisterResponse& response) const;
  Status answer(const inference::SystemSharedMemoryUnregisterRequest& request,
                inference::SystemSharedMemoryUnregisterResponse& response) const;

  // These lead to one call of `done`, from any thread, perhaps before they return.
  void begin(const inference::RepositoryModelLoadRequest& request,
             RepositoryControl::Done done) const;
  void begin(const inference::RepositoryModelUnloadRequest& request,
             RepositoryControl::Done done) const;

 private:
  void describe(const ServedModel& model, inference::ModelConfig& config) const;
  void count(const ServedModel& model, inference::ModelStatistics& statistics) const;

  const ServerFacts facts_;
};

}  // namespace tessera
