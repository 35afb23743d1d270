#include "front/kserve_service.h"

#include <string>

#include "front/later_method.h"
#include "inference.pb.h"

namespace tessera {
namespace {

template <typename Request, typename Response>
void add(const char* name, const KserveMetadata& metadata, http2::MethodTable& table) {
  table.add(std::string("/inference.GRPCInferenceService/") + name,
            std::make_unique<MessageMethod<Request, Response>>(
                [&metadata](const Request& request, Response& response) {
                  return metadata.answer(request, response);
                }));
}

template <typename Request>
void add_later(const char* name, const KserveMetadata& metadata, http2::MethodTable& table) {
  table.add(std::string("/inference.GRPCInferenceService/") + name,
            std::make_unique<LaterMethod<Request>>(
                [&metadata](const Request& request, RepositoryControl::Done done) {
                  metadata.begin(request, std::move(done));
                }));
}

}  // namespace

void add_kserve_methods(const KserveMetadata& metadata, http2::MethodTable& table) {
  using namespace inference;
  add<ServerLiveRequest, ServerLiveResponse>("ServerLive", metadata, table);
  add<ServerReadyRequest, ServerReadyResponse>("ServerReady", metadata, table);
  add<ModelReadyRequest, ModelReadyResponse>("ModelReady", metadata, table);
  add<ServerMetadataRequest, ServerMetadataResponse>("ServerMetadata", metadata, table);
  add<ModelMetadataRequest, ModelMetadataResponse>("ModelMetadata", metadata, table);
  add<ModelConfigRequest, ModelConfigResponse>("ModelConfig", metadata, table);
  add<ModelStatisticsRequest, ModelStatisticsResponse>("ModelStatistics", metadata, table);
  add<RepositoryIndexRequest, RepositoryIndexResponse>("RepositoryIndex", metadata, table);
  add_later<RepositoryModelLoadRequest>("RepositoryModelLoad", metadata, table);
  add_later<RepositoryModelUnloadRequest>("RepositoryModelUnload", metadata, table);
  if (!metadata.has_shared_memory()) return;
  add<SystemSharedMemoryStatusRequest, SystemSharedMemoryStatusResponse>("SystemSharedMemoryStatus",
                                                                         metadata, table);
  add<SystemSharedMemoryRegisterRequest, SystemSharedMemoryRegisterResponse>(
      "SystemSharedMemoryRegister", metadata, table);
  add<SystemSharedMemoryUnregisterRequest, SystemSharedMemoryUnregisterResponse>(
      "SystemSharedMemoryUnregister", metadata, table);
}

}  // namespace tessera
