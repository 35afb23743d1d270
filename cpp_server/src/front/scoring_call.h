// Predict and ModelInfer as methods of the HTTP/2 server: a call for scores with its transport.
//
// Contract: a method belongs to one loop. `context` and `counters` outlive it, and no call of it is
// in work when it is destroyed.
#pragma once

#include <memory>

#include "front/predict_service.h"
#include "front/wire_protocol.h"
#include "http2/call.h"
#include "http2/limits.h"

namespace tessera {

using MakeProtocol = std::unique_ptr<WireProtocol> (*)();

std::unique_ptr<http2::Method> make_scoring_method(const PredictContext& context,
                                                   http2::Counters& counters,
                                                   MakeProtocol make_protocol);

}  // namespace tessera
