// What every program here does before its first use of gRPC. Compiled against gRPC alone.
//
// Contract: call once, before other threads use gRPC.
#pragma once

#include <absl/synchronization/mutex.h>

namespace tessera {

// Debian's absl is built with a search for deadlocks at every lock of every mutex, meant for
// debugging; gRPC takes dozens for a call.
inline void prepare_grpc() { absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore); }

}  // namespace tessera
