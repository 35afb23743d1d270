// From a parsed ModelInferRequest to what the one decoder takes: names, data types, shapes and
// contents of its tensors are looked at here, and what they hold by RequestDecoder.
//
// Contract: an InferDecoder is immutable after construction and used from any number of threads at
// once. It never blocks. What it refuses it names: tensor and both numbers.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "common/clock.h"
#include "common/status.h"
#include "package/schema.h"
#include "request/decoder.h"
#include "request/field_names.h"
#include "request/infer_wire.h"
#include "request/wire.h"

namespace tessera {

// What a request says besides its tensors.
struct InferOptions {
  Duration timeout{0};  // 0: none
  std::int32_t priority = 0;
};

// Reads the parameters that a server must obey or refuse.
Status read_options(const InferRequestView& message, InferOptions& options);

// Typed contents as plain numbers; at most as many as a request may have.
struct InferStorage {
  std::array<std::vector<std::byte>, std::size(kInferInputs)> contents;

  // Held, whether used or not.
  std::size_t bytes() const;
};

class InferDecoder {
 public:
  InferDecoder(const InputSchema& schema, RequestLimits limits);

  // Checks what `message` says of its tensors and fills `request`, which views the message and
  // `storage`.
  Status decode(const InferRequestView& message, InferStorage& storage,
                PredictionRequestView& request) const;

  // Which of the model's outputs are asked for, in the order of the answer.
  Status choose_outputs(const InferRequestView& message, std::vector<std::size_t>& chosen) const;

 private:
  struct Tensor {
    const InferTensorView* view = nullptr;
    Bytes raw;  // where the message has raw contents
    std::int64_t elements = 0;
  };
  using Tensors = std::array<Tensor, std::size(kInferInputs)>;

  // Whether the model has features of the group that an input belongs to.
  bool takes(std::size_t input) const;
  Status refuse_unknown(std::string_view name) const;
  // The refusal of more ids than a request may have.
  Status refuse_ids(std::int64_t ids) const;
  Status find_tensors(const InferRequestView& message, Tensors& tensors) const;
  // The samples that the shapes agree on.
  Status count_samples(const Tensors& tensors, std::int64_t& samples) const;

  RequestLimits limits_;
  // How many features each group has: dense, id_list, id_score_list.
  std::array<std::int64_t, 3> features_;
  std::vector<OutputSpec> outputs_;
};

}  // namespace tessera
