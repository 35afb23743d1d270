#include "front/kserve_service.h"

#include <string>

#include "inference.pb.h"

namespace tessera {
namespace {

template <typename Request, typename Response>
void add(const char* name, const KserveMetadata& metadata, const FrontContext& context,
         http2::MethodTable& table) {
  table.add(std::string("/inference.GRPCInferenceService/") + name,
            std::make_unique<MessageMethod<Request, Response>>(
                context, [&metadata](const Request& request, Response& response) {
                  return metadata.answer(request, response);
                }));
}

}  // namespace

void add_kserve_methods(const KserveMetadata& metadata, const FrontContext& context,
                        http2::MethodTable& table) {
  using namespace inference;
  add<ServerLiveRequest, ServerLiveResponse>("ServerLive", metadata, context, table);
  add<ServerReadyRequest, ServerReadyResponse>("ServerReady", metadata, context, table);
  add<ModelReadyRequest, ModelReadyResponse>("ModelReady", metadata, context, table);
  add<ServerMetadataRequest, ServerMetadataResponse>("ServerMetadata", metadata, context, table);
  add<ModelMetadataRequest, ModelMetadataResponse>("ModelMetadata", metadata, context, table);
  add<ModelConfigRequest, ModelConfigResponse>("ModelConfig", metadata, context, table);
  add<ModelStatisticsRequest, ModelStatisticsResponse>("ModelStatistics", metadata, context, table);
  add<RepositoryIndexRequest, RepositoryIndexResponse>("RepositoryIndex", metadata, context, table);
}

}  // namespace tessera
