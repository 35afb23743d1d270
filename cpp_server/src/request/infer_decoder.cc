#include "request/infer_decoder.h"

#include <algorithm>
#include <limits>
#include <string>

#include "common/text.h"

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

Status check_raw(const InferTensorView& tensor, Bytes raw) {
  if (std::any_of(tensor.counts.begin(), tensor.counts.end(),
                  [](std::size_t count) { return count > 0; })) {
    return Status::invalid(text(tensor.name,
                                " has typed contents beside raw_input_contents, "
                                "expected only one of the two"));
  }
  const std::int64_t elements = elements_of(tensor);
  if (type_of(tensor) == DataType::kBytes) {
    if (count_raw_strings(raw) == elements) return {};
    return Status::invalid(text(tensor.name, " has ", raw.size(), " bytes, which are not ",
                                elements, " strings, each after its size in ", kStringHeadBytes,
                                " bytes"));
  }
  const std::uint64_t expected = static_cast<std::uint64_t>(elements) * width_of(type_of(tensor));
  if (raw.size() == expected) return {};
  return Status::invalid(text(tensor.name, " has ", raw.size(), " bytes, expected ", expected,
                              " (its shape has ", elements, " ", tensor.datatype, " elements)"));
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

// A parameter that is a whole number from 0 to `most`; 0 where it is not there.
Status read_number(const ParameterView& parameter, std::uint64_t most, std::uint64_t& number) {
  using Kind = ParameterView::Kind;
  number = 0;
  if (parameter.key.empty()) return {};
  if (parameter.kind != Kind::kInt64 && parameter.kind != Kind::kUint64) {
    return Status::invalid(
        text("parameter '", parameter.key, "' is neither an int64_param nor a uint64_param"));
  }
  number = parameter.number;
  const auto with_sign = static_cast<std::int64_t>(number);
  const bool negative = parameter.kind == Kind::kInt64 && with_sign < 0;
  if (!negative && number <= most) return {};
  return Status::invalid(text("parameter '", parameter.key, "' is ",
                              negative ? text(with_sign) : text(number), ", expected 0 to ", most));
}

Status refuse_sequence(const ParameterView& parameter) {
  using Kind = ParameterView::Kind;
  if (parameter.key.empty()) return {};
  const bool number = parameter.kind == Kind::kInt64 || parameter.kind == Kind::kUint64;
  if (number && parameter.number == 0) return {};
  if (parameter.kind == Kind::kString && parameter.string.empty()) return {};
  return Status::invalid(
      "parameter 'sequence_id' is not supported: models keep no state between requests");
}

}  // namespace

std::size_t InferStorage::bytes() const {
  std::size_t held = 0;
  for (const std::vector<std::byte>& numbers : contents) held += numbers.capacity();
  return held;
}

Status read_options(const InferRequestView& message, InferOptions& options) {
  constexpr std::uint64_t kMostMicros = std::numeric_limits<std::int64_t>::max();
  constexpr std::uint64_t kLastPriority = 2'147'483'646;
  options = {};
  std::uint64_t micros = 0;
  std::uint64_t priority = 0;
  Status status = read_number(message.timeout, kMostMicros, micros);
  if (status.ok()) status = read_number(message.priority, kLastPriority, priority);
  if (status.ok()) status = refuse_sequence(message.sequence_id);
  if (!status.ok()) return status;
  // A longer timeout is cut to what a Duration has room for, 292 years.
  options.timeout = std::chrono::microseconds(std::min(micros, kMostMicros / 1'000));
  if (priority > 0) options.priority = static_cast<std::int32_t>(kLastPriority + 1 - priority);
  return {};
}

InferDecoder::InferDecoder(const InputSchema& schema, RequestLimits limits)
    : limits_(limits),
      features_{static_cast<std::int64_t>(schema.dense_features.size()),
                static_cast<std::int64_t>(schema.group(Group::kIdList).size()),
                static_cast<std::int64_t>(schema.group(Group::kIdScoreList).size())},
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

Status InferDecoder::find_tensors(const InferRequestView& message, Tensors& tensors) const {
  if (message.raw_contents > 0 && message.raw_contents != message.inputs) {
    return Status::invalid(text("raw_input_contents has ", message.raw_contents,
                                " entries, expected ", message.inputs, ": one for each input"));
  }
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
    if (!given.unsupported.empty()) {
      return Status::invalid(
          text("parameter '", given.unsupported, "' of input '", given.name, "' is not supported"));
    }
    Status status = check_datatype(input, given);
    if (status.ok()) status = check_shape(input, given);
    if (!status.ok()) return status;
    tensor.view = &given;
    tensor.elements = elements_of(given);
    // Before strings are looked for one by one.
    if (type_of(given) == DataType::kBytes && tensor.elements > limits_.max_ids) {
      return refuse_ids(tensor.elements);
    }
    if (message.raw_contents > 0) tensor.raw = message.raw_content[i];
    status = message.raw_contents > 0 ? check_raw(given, tensor.raw) : check_typed(given);
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

Status InferDecoder::decode(const InferRequestView& message, InferStorage& storage,
                            PredictionRequestView& request) const {
  Tensors tensors;
  std::int64_t samples = 0;
  Status status = find_tensors(message, tensors);
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
    if (message.raw_contents > 0) return tensor.raw;
    return read_contents(*tensor.view, field_of(type_of(*tensor.view)), storage.contents[input]);
  };
  const auto fill = [&](std::size_t lengths, std::size_t values, SparseFeaturesView& group) {
    group.num_features = static_cast<std::int32_t>(features_[kGroupOf[lengths]]);
    group.lengths = content(lengths);
    const InferTensorView* const given = tensors[values].view;
    if (given != nullptr && type_of(*given) == DataType::kBytes) {
      const bool raw = message.raw_contents > 0;
      group.values_bytes.count = static_cast<std::size_t>(tensors[values].elements);
      group.values_bytes.message = raw ? tensors[values].raw : given->message;
      if (!raw) group.values_bytes.path = kTypedStrings;
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

Status InferDecoder::choose_outputs(const InferRequestView& message,
                                    std::vector<std::size_t>& chosen) const {
  chosen.clear();
  if (message.outputs == 0) {
    for (std::size_t i = 0; i < outputs_.size(); ++i) chosen.push_back(i);
    return {};
  }
  // With more outputs than the model has, one is named twice or is not one of them.
  std::vector<std::string_view> names;
  read_output_names(message, outputs_.size() + 1, names);
  for (const std::string_view name : names) {
    const auto found = std::find_if(outputs_.begin(), outputs_.end(),
                                    [&](const OutputSpec& output) { return output.name == name; });
    if (found == outputs_.end()) {
      std::string known;
      for (const OutputSpec& output : outputs_) {
        known += (known.empty() ? "'" : ", '") + output.name + "'";
      }
      return Status::invalid(text("output '", name, "' is unknown; this model has ", known));
    }
    const auto index = static_cast<std::size_t>(found - outputs_.begin());
    if (std::find(chosen.begin(), chosen.end(), index) != chosen.end()) {
      return Status::invalid(text("output '", name, "' is asked for twice"));
    }
    chosen.push_back(index);
  }
  if (message.unsupported_parameter.empty()) return {};
  return Status::invalid(text("parameter '", message.unsupported_parameter, "' of output '",
                              message.unsupported_output, "' is not supported"));
}

}  // namespace tessera
