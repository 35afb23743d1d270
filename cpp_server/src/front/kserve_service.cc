#include "front/kserve_service.h"

#include "common/text.h"
#include "front/grpc_status.h"

namespace tessera {
namespace {

template <typename Message>
Status parse(grpc::ByteBuffer bytes, Message& message) {
  const std::size_t size = bytes.Length();
  if (grpc::SerializationTraits<Message>::Deserialize(&bytes, &message).ok()) return {};
  return Status::invalid(
      text("the message (", size, " bytes) is not a valid ", Message::descriptor()->name()));
}

template <typename Message>
void write(const Message& message, grpc::ByteBuffer* bytes) {
  bool own = false;
  // Fails where a message has more than 2 GB.
  (void)grpc::SerializationTraits<Message>::Serialize(message, bytes, &own);
}

}  // namespace

template <typename Request, typename Response>
auto KserveService::tell(Context* context, const Bytes& request, Bytes* response) const
    -> Reactor* {
  Request asked;
  Response told;
  Status status = parse(request, asked);
  if (status.ok()) status = metadata_.answer(asked, told);
  if (status.ok()) write(told, response);
  Reactor* const reactor = context->DefaultReactor();
  reactor->Finish(to_grpc(status));
  return reactor;
}

auto KserveService::ServerLive(Context* context, const Bytes* request, Bytes* response)
    -> Reactor* {
  return tell<inference::ServerLiveRequest, inference::ServerLiveResponse>(context, *request,
                                                                           response);
}

auto KserveService::ServerReady(Context* context, const Bytes* request, Bytes* response)
    -> Reactor* {
  return tell<inference::ServerReadyRequest, inference::ServerReadyResponse>(context, *request,
                                                                             response);
}

auto KserveService::ModelReady(Context* context, const Bytes* request, Bytes* response)
    -> Reactor* {
  return tell<inference::ModelReadyRequest, inference::ModelReadyResponse>(context, *request,
                                                                           response);
}

auto KserveService::ServerMetadata(Context* context, const Bytes* request, Bytes* response)
    -> Reactor* {
  return tell<inference::ServerMetadataRequest, inference::ServerMetadataResponse>(
      context, *request, response);
}

auto KserveService::ModelMetadata(Context* context, const Bytes* request, Bytes* response)
    -> Reactor* {
  return tell<inference::ModelMetadataRequest, inference::ModelMetadataResponse>(context, *request,
                                                                                 response);
}

auto KserveService::ModelConfig(Context* context, const Bytes* request, Bytes* response)
    -> Reactor* {
  return tell<inference::ModelConfigRequest, inference::ModelConfigResponse>(context, *request,
                                                                             response);
}

auto KserveService::ModelStatistics(Context* context, const Bytes* request, Bytes* response)
    -> Reactor* {
  return tell<inference::ModelStatisticsRequest, inference::ModelStatisticsResponse>(
      context, *request, response);
}

auto KserveService::RepositoryIndex(Context* context, const Bytes* request, Bytes* response)
    -> Reactor* {
  return tell<inference::RepositoryIndexRequest, inference::RepositoryIndexResponse>(
      context, *request, response);
}

}  // namespace tessera
