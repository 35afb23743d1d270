// grpc.reflection.v1 and v1alpha ServerReflection: tools ask which services there are and what
// their messages look like. Both versions have the same messages on the wire.
//
// Contract: add_reflection_methods is called once for each loop, before it runs; the methods are
// the loop's. Not more than kReflectionCalls calls may be open on a loop. Compiled against protobuf
// alone.
#pragma once

#include "front/message_method.h"
#include "http2/method_table.h"

namespace tessera {

// What such a call holds of answers that have not been read is not accounted for.
inline constexpr int kReflectionCalls = 64;

void add_reflection_methods(http2::MethodTable& table);

}  // namespace tessera
