// A status as gRPC sends it. Compiled against gRPC alone.
//
// Contract: free function; any thread.
#pragma once

#include <grpcpp/support/status.h>

#include "common/status.h"

namespace tessera {

inline grpc::Status to_grpc(const Status& status) {
  // It travels in a header, and may quote the client's text.
  constexpr std::size_t kMaxMessage = 1'000;
  return {static_cast<grpc::StatusCode>(status.code), status.message.substr(0, kMaxMessage)};
}

}  // namespace tessera
