// What differs between the wire protocols that a model is called by: how a message says what it
// wants, and how an answer is written. predict_service.h has the rest of a call's way.
//
// Contract: a WireProtocol belongs to one call, is used again and again, and keeps views of the
// message from parse until the answer is written. Nothing blocks.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "batching/pending_request.h"
#include "common/status.h"
#include "model/served_model.h"
#include "request/shared_memory.h"
#include "request/wire.h"

namespace tessera {

class WireProtocol {
 public:
  virtual ~WireProtocol() = default;

  // Another one of the same protocol, which has parsed nothing, for messages that `copy` has made.
  virtual std::unique_ptr<WireProtocol> another() const = 0;

  // A copy of the message that was parsed and decoded last, with all that it needs of elsewhere,
  // and how many bytes it has.
  virtual std::vector<std::byte> copy(Bytes message) const {
    return {message.begin(), message.end()};
  }
  virtual std::size_t copy_bytes(Bytes message) const { return message.size(); }

  // The call's name: Predict or ModelInfer.
  virtual std::string_view method_name() const = 0;

  // The message's type, for messages.
  virtual std::string_view message_name() const = 0;

  // False: `message` is not a valid message of this protocol.
  virtual bool parse(Bytes message) = 0;

  // What was parsed, until the next parse.
  virtual std::string_view model_name() const = 0;
  virtual std::string_view model_version() const = 0;

  // The key that the message gives for shares of the traffic; empty: it gives none. A status where
  // it cannot be one.
  virtual Status read_traffic_key(std::string_view& key) const = 0;

  // Checks what was parsed against what `model` takes and fills `call`'s request, its priority,
  // and, where it asks for less time than `call` has had since `began`, its deadline.
  virtual Status decode(const ServedModel& model, TimePoint began, PendingRequest& call) = 0;

  // Writes what goes elsewhere than into the answer; before `write`.
  virtual Status write_elsewhere(const ResponseParts& /*parts*/) const { return {}; }

  // Bytes of the answer that `write` will write of `outputs`, in the model's order, for `call`.
  virtual std::size_t response_bytes(const ResponseParts& parts) const = 0;
  virtual void write(const ResponseParts& parts, std::byte* out) const = 0;

  // Bytes of what decode has made of the message beside it, and of what the rows of shared features
  // make in `model`: few bytes can ask for many.
  virtual std::size_t copied_bytes(const ServedModel& model,
                                   const DecodedRequest& request) const = 0;

  // The call has its answer: what it shared with others is given back.
  virtual void end_call() {}

  // Memory kept for the next call, and an end of it and of the views.
  virtual std::size_t held_bytes() const = 0;
  virtual void free_memory() = 0;
};

// protos/predictor.proto: Predict.
std::unique_ptr<WireProtocol> make_predict_protocol();

// protos/inference.proto: ModelInfer. Tensors may be in `memory`, which outlives the protocol;
// null: there is none.
std::unique_ptr<WireProtocol> make_infer_protocol(SharedMemory* memory = nullptr);

}  // namespace tessera
