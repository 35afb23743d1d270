// From a parsed ModelInferRequest to what the one decoder takes: names, data types, shapes and
// contents of its tensors are looked at here, and what they hold by RequestDecoder.
//
// Contract: an InferDecoder is immutable after construction and used from any number of threads at
// once. It never blocks. What it refuses it names: tensor and both numbers.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "common/status.h"
#include "package/schema.h"
#include "request/decoder.h"
#include "request/field_names.h"
#include "request/infer_parameters.h"
#include "request/infer_wire.h"
#include "request/shared_memory.h"
#include "request/wire.h"

namespace tessera {

// Whether a request may have tensors in shared memory, and where these are.
struct InferRegions {
  SharedMemory* memory = nullptr;  // where they are; null: they may not...
  // ...but in a copy of a request, whose last raw contents they are (WireProtocol::copy), and whose
  // scores are written nowhere.
  bool appended = false;

  bool allowed() const { return memory != nullptr || appended; }
};

// Typed contents as plain numbers, at most as many as a request may have, and copies of what lies
// in shared memory.
struct InferStorage {
  std::array<std::vector<std::byte>, std::size(kInferInputs)> contents;
  std::size_t copied_bytes = 0;  // that decode has made beside the message
  // The inputs whose `contents` are copies of shared memory, in the order of the message.
  std::size_t region_count = 0;
  std::array<std::size_t, std::size(kInferInputs)> regions{};

  // Held, whether used or not.
  std::size_t bytes() const;
};

class InferDecoder {
 public:
  InferDecoder(const InputSchema& schema, RequestLimits limits);

  // Checks what `message` says of its tensors and fills `request`, which views the message and
  // `storage`.
  Status decode(const InferRequestView& message, const InferRegions& regions, InferStorage& storage,
                PredictionRequestView& request) const;

  // Which of the model's outputs are asked for, in the order of the answer.
  Status choose_outputs(const InferRequestView& message, const InferRegions& regions,
                        std::vector<std::size_t>& chosen) const;

  // Where the outputs that were chosen go, for so many samples: one for each of `chosen`, or none
  // at all where none goes into shared memory.
  Status place_outputs(const InferRequestView& message, const SharedMemory& memory,
                       std::int64_t samples, const std::vector<std::size_t>& chosen,
                       std::vector<SharedSpan>& places) const;

 private:
  struct Tensor {
    const InferTensorView* view = nullptr;
    std::optional<Bytes> raw;  // nothing: its contents are typed
    std::int64_t elements = 0;
  };
  using Tensors = std::array<Tensor, std::size(kInferInputs)>;

  // Whether the model has features of the group that an input belongs to.
  bool takes(std::size_t input) const;
  Status refuse_unknown(std::string_view name) const;
  // The refusal of more ids than a request may have.
  Status refuse_ids(std::int64_t ids) const;
  Status find_tensors(const InferRequestView& message, const InferRegions& regions,
                      InferStorage& storage, Tensors& tensors) const;
  static Status read_region(std::size_t input, const InferTensorView& tensor,
                            const SharedMemory& memory, InferStorage& storage);
  // The samples that the shapes agree on.
  Status count_samples(const Tensors& tensors, std::int64_t& samples) const;

  RequestLimits limits_;
  // How many features each group has: dense, id_list, id_score_list.
  std::array<std::int64_t, 3> features_;
  std::vector<OutputSpec> outputs_;
};

}  // namespace tessera
