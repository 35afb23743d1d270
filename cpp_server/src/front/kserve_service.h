// inference.GRPCInferenceService, but for ModelInfer: the calls that KserveMetadata answers.
//
// Contract: what `metadata` refers to outlives the methods. Compiled against protobuf alone.
#pragma once

#include "front/kserve_metadata.h"
#include "front/message_method.h"
#include "http2/method_table.h"

namespace tessera {

void add_kserve_methods(const KserveMetadata& metadata, http2::MethodTable& table);

}  // namespace tessera
