#include "request/infer_decoder.h"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include "common/text.h"
#include "request/raw_contents.h"

namespace tessera {
namespace {

constexpr std::size_t kInputs = std::size(kInferInputs);
// Places in kInferInputs.
constexpr std::size_t kDense = 0;
constexpr std::size_t kPlainLengths = 1;
constexpr std::size_t kPlainValues = 2;
constexpr std::size_t kScoredLengths = 3;
constexpr std::size_t kScoredValues = 4;
constexpr std::size_t kScoredWeights = 5;
// The group that each input belongs to.
constexpr std::array<std::size_t, kInputs> kGroupOf = {0, 1, 1, 2, 2, 2};
constexpr std::array<std::string_view, 3> kGroups = {"float_features", "id_list_features",
                                                     "id_score_list_features"};

enum class DataType { kFp32, kInt32, kInt64, kBytes };
constexpr auto kDataTypes = std::to_array<std::string_view>({"FP32", "INT32", "INT64", "BYTES"});
static_assert(kDataTypes.size() == enum_size<DataType::kBytes>());

// How many bytes a number of `type`, which is not kBytes, takes.
std::size_t width_of(DataType type) { return type == DataType::kInt64 ? 8 : 4; }

ContentField field_of(DataType type) {
  switch (type) {
    case DataType::kFp32: return ContentField::kFp32;
    case DataType::kInt32: return ContentField::kInt;
    case DataType::kInt64: return ContentField::kInt64;
    case DataType::kBytes: return ContentField::kBytes;
  }
  return ContentField::kFp32;
}

bool holds_ids(std::size_t input) { return input == kPlainValues || input == kScoredValues; }

// The type of a tensor whose datatype was checked.
DataType type_of(const InferTensorView& tensor) {
  const auto found = std::find(kDataTypes.begin(), kDataTypes.end(), tensor.datatype);
  return static_cast<DataType>(found - kDataTypes.begin());
}

Status check_datatype(std::size_t input, const InferTensorView& tensor) {
  const bool dense = input == kDense || input == kScoredWeights;
  const bool good =
      dense ? tensor.datatype == "FP32"
            : tensor.datatype == "INT32" ||
                  (holds_ids(input) && (tensor.datatype == "INT64" || tensor.datatype == "BYTES"));
  if (good) return {};
  const char* const expected = dense              ? "FP32"
                               : holds_ids(input) ? "INT64 or INT32 or BYTES"
                                                  : "INT32";
  return Status::invalid(
      text(tensor.name, " has datatype '", tensor.datatype, "', expected ", expected));
}

// Two sizes at most: their product, and eight times it, fit 64 bits.
Status check_shape(std::size_t input, const InferTensorView& tensor) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  const std::size_t rank = input == kDense ? 2 : 1;
  if (tensor.rank != rank) {
    return Status::invalid(
        text(tensor.name, ".shape has ", tensor.rank, " dimensions, expected ", rank));
  }
  for (std::size_t i = 0; i < rank; ++i) {
    if (tensor.dims[i] < 0 || tensor.dims[i] > kMost) {
      return Status::invalid(
          text(tensor.name, ".shape[", i, "] is ", tensor.dims[i], ", expected 0 to ", kMost));
    }
  }
  return {};
}

// The elements that the shape of a checked tensor has.
std::int64_t elements_of(const InferTensorView& tensor) {
  return tensor.rank == 2 ? tensor.dims[0] * tensor.dims[1] : tensor.dims[0];
}

Status refuse_typed(const InferTensorView& tensor, const char* beside) {
  if (std::all_of(tensor.counts.begin(), tensor.counts.end(),
                  [](std::size_t count) { return count == 0; })) {
    return {};
  }
  return Status::invalid(
      text(tensor.name, " has typed contents beside ", beside, ", expected only one of the two"));
}

// Whether so many bytes are the numbers of a checked tensor, whose datatype is not BYTES.
Status check_raw_size(const InferTensorView& tensor, std::uint64_t bytes) {
  const std::int64_t elements = elements_of(tensor);
  const std::uint64_t expected = static_cast<std::uint64_t>(elements) * width_of(type_of(tensor));
  if (bytes == expected) return {};
  return Status::invalid(text(tensor.name, " has ", bytes, " bytes, expected ", expected,
                              " (its shape has ", elements, " ", tensor.datatype, " elements)"));
}

Status check_raw_strings(const InferTensorView& tensor, Bytes raw) {
  const std::int64_t elements = elements_of(tensor);
  if (count_raw_strings(raw) == elements) return {};
  return Status::invalid(text(tensor.name, " has ", raw.size(), " bytes, which are not ", elements,
                              " strings, each after its size in ", kStringHeadBytes, " bytes"));
}

Status check_raw(const InferTensorView& tensor, Bytes raw) {
  if (Status status = refuse_typed(tensor, "raw_input_contents"); !status.ok()) return status;
  if (type_of(tensor) == DataType::kBytes) return check_raw_strings(tensor, raw);
  return check_raw_size(tensor, raw.size());
}

Status check_typed(const InferTensorView& tensor) {
  const auto own = static_cast<std::size_t>(field_of(type_of(tensor)));
  for (std::size_t i = 0; i < tensor.counts.size(); ++i) {
    if (i != own && tensor.counts[i] > 0) {
      return Status::invalid(text(tensor.name, " has contents in ", kContentFields[i],
                                  ", expected only ", kContentFields[own]));
    }
  }
  const std::int64_t elements = elements_of(tensor);
  if (tensor.counts[own] == static_cast<std::uint64_t>(elements)) return {};
  return Status::invalid(
      text(tensor.name, " has ", tensor.counts[own], " elements, its shape has ", elements));
}

}  // namespace

std::size_t InferStorage::bytes() const {
  std::size_t held = 0;
  for (const std::vector<std::byte>& numbers : contents) held += numbers.capacity();
  return held;
}

InferDecoder::InferDecoder(const InputSchema& schema, RequestLimits limits)
    : limits_(limits),
      features_{static_cast<std::int64_t>(schema.dense_features.size()),
                static_cast<std::int64_t>(schema.group_size(Group::kIdList)),
                static_cast<std::int64_t>(schema.group_size(Group::kIdScoreList))},
      outputs_(schema.outputs) {}

bool InferDecoder::takes(std::size_t input) const { return features_[kGroupOf[input]] > 0; }

Status InferDecoder::refuse_unknown(std::string_view name) const {
  std::string known;
  for (std::size_t input = 0; input < kInputs; ++input) {
    if (takes(input)) known += text(known.empty() ? "'" : ", '", kInferInputs[input], "'");
  }
  return Status::invalid(text("input '", name, "' is unknown; this model has ", known));
}

Status InferDecoder::refuse_ids(std::int64_t ids) const {
  return Status::invalid(text("the request has ", ids, " ids, the limit is ", limits_.max_ids));
}

Status InferDecoder::find_tensors(const InferRequestView& message, const InferRegions& regions,
                                  InferStorage& storage, Tensors& tensors) const {
  RawContents contents(message, regions);
  if (Status status = contents.check_count(); !status.ok()) return status;
  // With more inputs than there are names, two have the same name or one has none of them.
  for (std::size_t i = 0; i < std::min(message.inputs, message.kMaxInputs); ++i) {
    const InferTensorView& given = message.input[i];
    const auto found = std::find(std::begin(kInferInputs), std::end(kInferInputs), given.name);
    if (found == std::end(kInferInputs)) return refuse_unknown(given.name);
    const auto input = static_cast<std::size_t>(found - std::begin(kInferInputs));
    Tensor& tensor = tensors[input];
    if (tensor.view != nullptr) {
      return Status::invalid(text("input '", given.name, "' is given twice"));
    }
    Status status =
        check_parameters("input", given.name, given.place, given.unsupported, regions.allowed());
    if (status.ok()) status = check_datatype(input, given);
    if (status.ok()) status = check_shape(input, given);
    if (!status.ok()) return status;
    tensor.view = &given;
    tensor.elements = elements_of(given);
    // Before strings are looked for one by one.
    if (type_of(given) == DataType::kBytes && tensor.elements > limits_.max_ids) {
      return refuse_ids(tensor.elements);
    }
    const std::optional<Bytes> raw = contents.next(given);
    if (given.place.given() && regions.memory != nullptr) {
      status = read_region(input, given, *regions.memory, storage);
      tensor.raw = storage.contents[input];
    } else {
      tensor.raw = raw;
      status = raw.has_value() ? check_raw(given, *raw) : check_typed(given);
    }
    if (!status.ok()) return status;
  }
  for (std::size_t input = 0; input < kInputs; ++input) {
    const Tensor& tensor = tensors[input];
    if (takes(input) && tensor.view == nullptr) {
      return Status::invalid(text("input '", kInferInputs[input], "' is missing"));
    }
    if (!takes(input) && tensor.elements > 0) {
      return Status::invalid(text(kInferInputs[input], " has ", tensor.elements,
                                  " elements, expected 0: the model has no ",
                                  kGroups[kGroupOf[input]]));
    }
  }
  return {};
}

Status InferDecoder::count_samples(const Tensors& tensors, std::int64_t& samples) const {
  bool known = takes(kDense);
  if (known) {
    const std::int64_t features = features_[kGroupOf[kDense]];
    const InferTensorView& tensor = *tensors[kDense].view;
    if (tensor.dims[1] != features) {
      return Status::invalid(text(tensor.name, ".shape[1] is ", tensor.dims[1], ", the model has ",
                                  features, " dense features"));
    }
    samples = tensor.dims[0];
  }
  for (const std::size_t input : {kPlainLengths, kScoredLengths}) {
    if (!takes(input)) continue;
    const std::int64_t features = features_[kGroupOf[input]];
    const std::int64_t lengths = tensors[input].elements;
    if (!known && lengths % features != 0) {
      return Status::invalid(text(kInferInputs[input], " has ", lengths,
                                  " elements, expected a multiple of ", features, " features"));
    }
    if (!known) samples = lengths / features;
    known = true;
    if (lengths != features * samples) {
      return Status::invalid(text(kInferInputs[input], " has ", lengths, " elements, expected ",
                                  features * samples, " (", features, " features of ", samples,
                                  " samples)"));
    }
  }
  return {};
}

// Copies what a tensor has in shared memory, and checks the copy alone: the client may change what
// is there at any time.
Status InferDecoder::read_region(std::size_t input, const InferTensorView& tensor,
                                 const SharedMemory& memory, InferStorage& storage) {
  SharedSpan span;
  Status status = refuse_typed(tensor, "shared memory");
  if (status.ok()) status = locate("input", tensor.name, tensor.place, memory, span);
  const bool strings = type_of(tensor) == DataType::kBytes;
  if (status.ok() && !strings) status = check_raw_size(tensor, span.byte_size);
  if (!status.ok()) return status;
  storage.copied_bytes += span.byte_size;
  if (const std::uint64_t most = memory.limits().request_bytes; storage.copied_bytes > most) {
    return Status::invalid(text("the request has ", storage.copied_bytes,
                                " bytes in shared memory, the limit is ", most));
  }
  std::vector<std::byte>& copy = storage.contents[input];
  copy.resize(span.byte_size);
  status = span.region->read(span.offset, copy);
  if (!status.ok()) return of_tensor("input", tensor.name, std::move(status));
  storage.regions[storage.region_count++] = input;
  return strings ? check_raw_strings(tensor, copy) : Status{};
}

Status InferDecoder::decode(const InferRequestView& message, const InferRegions& regions,
                            InferStorage& storage, PredictionRequestView& request) const {
  Tensors tensors;
  std::int64_t samples = 0;
  storage.copied_bytes = 0;
  storage.region_count = 0;
  Status status = find_tensors(message, regions, storage, tensors);
  if (status.ok()) status = count_samples(tensors, samples);
  if (!status.ok()) return status;
  // Before typed numbers, of a byte each, become numbers of eight.
  if (samples > limits_.max_samples) {
    return Status::invalid(
        text("batch_size is ", samples, ", the limit is ", limits_.max_samples, " samples"));
  }
  const std::int64_t ids = tensors[kPlainValues].elements + tensors[kScoredValues].elements;
  const std::int64_t most = std::max(ids, tensors[kScoredWeights].elements);
  if (most > limits_.max_ids) return refuse_ids(most);
  const auto content = [&](std::size_t input) -> Bytes {
    const Tensor& tensor = tensors[input];
    if (tensor.view == nullptr) return {};
    if (tensor.raw.has_value()) return *tensor.raw;
    const Bytes numbers =
        read_contents(*tensor.view, field_of(type_of(*tensor.view)), storage.contents[input]);
    storage.copied_bytes += numbers.size();
    return numbers;
  };
  const auto fill = [&](std::size_t lengths, std::size_t values, SparseFeaturesView& group) {
    group.num_features = static_cast<std::int32_t>(features_[kGroupOf[lengths]]);
    group.lengths = content(lengths);
    const InferTensorView* const given = tensors[values].view;
    if (given != nullptr && type_of(*given) == DataType::kBytes) {
      const std::optional<Bytes>& raw = tensors[values].raw;
      group.values_bytes.count = static_cast<std::size_t>(tensors[values].elements);
      group.values_bytes.message = raw.value_or(given->message);
      if (!raw.has_value()) group.values_bytes.path = kTypedStrings;
      return;
    }
    const bool wide = given != nullptr && type_of(*given) == DataType::kInt64;
    (wide ? group.values_int64 : group.values) = content(values);
  };
  request = {};
  request.batch_size = static_cast<std::int32_t>(samples);
  request.float_features.num_features = static_cast<std::int32_t>(features_[0]);
  request.float_features.values = content(kDense);
  fill(kPlainLengths, kPlainValues, request.id_list_features);
  fill(kScoredLengths, kScoredValues, request.id_score_list_features);
  request.id_score_list_features.weights = content(kScoredWeights);
  return {};
}

Status InferDecoder::choose_outputs(const InferRequestView& message, const InferRegions& regions,
                                    std::vector<std::size_t>& chosen) const {
  chosen.clear();
  if (message.outputs == 0) {
    for (std::size_t i = 0; i < outputs_.size(); ++i) chosen.push_back(i);
    return {};
  }
  // With more outputs than the model has, one is named twice or is not one of them.
  std::vector<InferOutputView> asked;
  read_outputs(message, outputs_.size() + 1, asked);
  for (const InferOutputView& one : asked) {
    const auto found =
        std::find_if(outputs_.begin(), outputs_.end(),
                     [&](const OutputSpec& output) { return output.name == one.name; });
    if (found == outputs_.end()) {
      std::string known;
      for (const OutputSpec& output : outputs_) {
        known += (known.empty() ? "'" : ", '") + output.name + "'";
      }
      return Status::invalid(text("output '", one.name, "' is unknown; this model has ", known));
    }
    const auto index = static_cast<std::size_t>(found - outputs_.begin());
    if (std::find(chosen.begin(), chosen.end(), index) != chosen.end()) {
      return Status::invalid(text("output '", one.name, "' is asked for twice"));
    }
    Status status =
        check_parameters("output", one.name, one.place, one.unsupported, regions.allowed());
    if (!status.ok()) return status;
    chosen.push_back(index);
  }
  return {};
}

Status InferDecoder::place_outputs(const InferRequestView& message, const SharedMemory& memory,
                                   std::int64_t samples, const std::vector<std::size_t>& chosen,
                                   std::vector<SharedSpan>& places) const {
  places.clear();
  if (message.placed_outputs == 0) return {};
  std::vector<InferOutputView> asked;
  read_outputs(message, chosen.size(), asked);
  places.resize(asked.size());
  for (std::size_t at = 0; at < asked.size(); ++at) {
    const InferOutputView& one = asked[at];
    if (!one.place.given()) continue;
    SharedSpan& place = places[at];
    Status status = locate("output", one.name, one.place, memory, place);
    if (!status.ok()) return status;
    const auto bytes =
        static_cast<std::uint64_t>(samples * outputs_[chosen[at]].width) * sizeof(float);
    if (bytes > place.byte_size) {
      return Status::invalid(text("output '", one.name, "' has ", bytes,
                                  " bytes, its part of shared memory region '",
                                  place.region->facts().name, "' has ", place.byte_size));
    }
    status = place.region->open_for_writing();
    if (!status.ok()) return of_tensor("output", one.name, std::move(status));
  }
  return {};
}

}  // namespace tessera
