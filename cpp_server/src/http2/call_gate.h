// Decides whether a call may be heard, before anything of it but its headers is looked at.
//
// Contract: any thread; nothing blocks.
#pragma once

#include <string_view>

#include "common/status.h"

namespace tessera::http2 {

class CallGate {
 public:
  virtual ~CallGate() = default;
  // Counts a call with this `authorization` header, which may be empty; what is not OK is its
  // answer.
  virtual Status admit(std::string_view authorization) = 0;
};

}  // namespace tessera::http2
