// inference.GRPCInferenceService: ModelInfer, which grpc_front.cc's completion queues answer, and
// the calls that KserveMetadata answers. Those come as bytes, too, so that a message that cannot be
// parsed gets our status rather than gRPC's.
//
// Contract: gRPC calls its methods from threads of its own; none blocks. What `facts` refers to
// outlives the service, and the service the gRPC server that it is registered with. Compiled
// against gRPC alone.
#pragma once

#include <utility>

#include "front/kserve_metadata.h"
#include "inference.grpc.pb.h"

namespace tessera {

namespace kserve {

using Service = inference::GRPCInferenceService;
template <typename Base>
using Metadata =
    Service::WithRawCallbackMethod_ServerLive<Service::WithRawCallbackMethod_ServerReady<
        Service::WithRawCallbackMethod_ModelReady<Service::WithRawCallbackMethod_ServerMetadata<
            Service::WithRawCallbackMethod_ModelMetadata<Base>>>>>;
template <typename Base>
using Extensions =
    Service::WithRawCallbackMethod_ModelConfig<Service::WithRawCallbackMethod_ModelStatistics<
        Service::WithRawCallbackMethod_RepositoryIndex<Base>>>;
using Methods = Service::WithRawMethod_ModelInfer<Metadata<Extensions<Service::Service>>>;

}  // namespace kserve

class KserveService final : public kserve::Methods {
 public:
  explicit KserveService(ServerFacts facts) : metadata_(std::move(facts)) {}

 private:
  using Context = grpc::CallbackServerContext;
  using Bytes = grpc::ByteBuffer;
  using Reactor = grpc::ServerUnaryReactor;

  template <typename Request, typename Response>
  Reactor* tell(Context* context, const Bytes& request, Bytes* response) const;

  Reactor* ServerLive(Context* context, const Bytes* request, Bytes* response) override;
  Reactor* ServerReady(Context* context, const Bytes* request, Bytes* response) override;
  Reactor* ModelReady(Context* context, const Bytes* request, Bytes* response) override;
  Reactor* ServerMetadata(Context* context, const Bytes* request, Bytes* response) override;
  Reactor* ModelMetadata(Context* context, const Bytes* request, Bytes* response) override;
  Reactor* ModelConfig(Context* context, const Bytes* request, Bytes* response) override;
  Reactor* ModelStatistics(Context* context, const Bytes* request, Bytes* response) override;
  Reactor* RepositoryIndex(Context* context, const Bytes* request, Bytes* response) override;

  const KserveMetadata metadata_;
};

}  // namespace tessera
