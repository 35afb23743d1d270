// The raw contents of a ModelInferRequest's inputs, given out one after the other. Inputs in shared
// memory have none, but in a copy of the request: there they are the last ones.
//
// Contract: borrows the message. Nothing throws or blocks.
#pragma once

#include <algorithm>
#include <cstddef>
#include <optional>

#include "common/status.h"
#include "common/text.h"
#include "request/infer_decoder.h"
#include "request/infer_wire.h"

namespace tessera {

class RawContents {
 public:
  RawContents(const InferRequestView& message, const InferRegions& regions)
      : message_(message),
        appended_(regions.appended ? message.placed_inputs : 0),
        own_(message.raw_contents - std::min(message.raw_contents, appended_)),
        // One that is not allowed is refused by its name.
        counts_(regions.allowed() || message.placed_inputs == 0) {}

  Status check_count() const {
    const std::size_t expected = message_.inputs - message_.placed_inputs;
    if (own_ == 0 || own_ == expected || !counts_) return {};
    return Status::invalid(text("raw_input_contents has ", own_, " entries, expected ", expected,
                                ": one for each input",
                                message_.placed_inputs > 0 ? " that is not in shared memory" : ""));
  }

  // Nothing: the tensor's contents are typed.
  std::optional<Bytes> next(const InferTensorView& tensor) {
    if (tensor.place.given()) {
      return appended_ > 0 ? std::optional(at(own_ + next_appended_++)) : std::nullopt;
    }
    return own_ > 0 ? std::optional(at(next_own_++)) : std::nullopt;
  }

 private:
  Bytes at(std::size_t index) const {
    return index < std::min(message_.raw_contents, message_.kMaxInputs)
               ? message_.raw_content[index]
               : Bytes();
  }

  const InferRequestView& message_;
  const std::size_t appended_;
  const std::size_t own_;
  const bool counts_;
  std::size_t next_own_ = 0;
  std::size_t next_appended_ = 0;
};

}  // namespace tessera
