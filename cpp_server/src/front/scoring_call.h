// Predict and ModelInfer as methods of the HTTP/2 server: a call for scores with its transport.
//
// Contract: a method belongs to the event loop `loop` of `server`. `context` and the server outlive
// it, and no call of it is in work when it is destroyed. The loop runs short passes itself
// (ServedModel).
#pragma once

#include <cstddef>
#include <functional>
#include <memory>

#include "front/predict_service.h"
#include "front/wire_protocol.h"
#include "http2/call.h"
#include "http2/server.h"

namespace tessera {

using MakeProtocol = std::function<std::unique_ptr<WireProtocol>()>;

std::unique_ptr<http2::Method> make_scoring_method(const PredictContext& context,
                                                   http2::Server& server, std::size_t loop,
                                                   MakeProtocol make_protocol);

}  // namespace tessera
