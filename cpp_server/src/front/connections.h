// Ending the connections of a port before its server is shut down.
//
// gRPC answers CANCELLED, by resetting the stream, to every call that reaches a server between the
// beginning of its shutdown and the client's notice of it. A client whose connection has ended gets
// UNAVAILABLE instead, which says what is the case and may be tried again elsewhere.
//
// Contract: any thread; blocks for up to `limit`. To be called when every answer that matters has
// left: what is still being written may be lost.
#pragma once

#include "common/clock.h"

namespace tessera {

// Stops listening on the TCP port `port` of this process, ends the reading side of its connections,
// and waits until their owner has closed them, or `until`.
void end_connections(int port, TimePoint until);

}  // namespace tessera
