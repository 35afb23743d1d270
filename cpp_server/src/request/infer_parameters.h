// What a ModelInferRequest says in parameters: those of the call, and those that say that a tensor
// lies in shared memory.
//
// Contract: free functions without state; any thread; nothing blocks. What is refused is named.
#pragma once

#include <cstdint>
#include <string_view>

#include "common/clock.h"
#include "common/status.h"
#include "request/infer_wire.h"
#include "request/shared_memory.h"

namespace tessera {

// What a request says besides its tensors.
struct InferOptions {
  Duration timeout{0};  // 0: none
  std::int32_t priority = 0;
  bool timings = false;  // the answer tells where its time went
};

// Reads the parameters that a server must obey or refuse.
Status read_options(const InferRequestView& message, InferOptions& options);

// Refuses the first parameter, in the alphabet's order, of an input or output (`kind`) that would
// have to be obeyed and is not; those of shared memory unless `may_be_placed`.
Status check_parameters(const char* kind, std::string_view name, const RegionView& place,
                        std::string_view unsupported, bool may_be_placed);

// The part of a region that a tensor's parameters name, all of which lies in the region.
Status locate(const char* kind, std::string_view name, const RegionView& place,
              const SharedMemory& memory, SharedSpan& span);

// What is wrong, with the name of the tensor that it is about.
Status of_tensor(const char* kind, std::string_view name, Status status);

}  // namespace tessera
