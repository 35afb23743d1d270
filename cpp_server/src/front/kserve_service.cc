#include "front/kserve_service.h"

#include <string>

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
}

}  // namespace tessera
