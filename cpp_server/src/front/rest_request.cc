#include "front/rest_request.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string_view>
#include <vector>

#include "common/text.h"
#include "front/rest_json.h"
#include "inference.pb.h"
#include "request/strings.h"

namespace tessera {
namespace {

using Json = nlohmann::json;
using inference::InferParameter;
using inference::ModelInferRequest;

constexpr std::int64_t kLargestDimension = std::numeric_limits<std::int32_t>::max();

// What is wrong with a body, within this file.
class BadBody : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

template <typename... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
  throw BadBody(text(parts...));
}

bool is_int64(const Json& value) {
  return value.is_number_integer() &&
         (!value.is_number_unsigned() ||
          value.get<std::uint64_t>() <= std::numeric_limits<std::int64_t>::max());
}

// The value of `key` in an object; null where it has none.
const Json* find(const Json& object, const char* key) {
  const auto found = object.find(key);
  return found == object.end() ? nullptr : &*found;
}

std::string string_of(const Json* value, const std::string& what) {
  if (value == nullptr || !value->is_string()) refuse(what, " is not a string");
  return value->get<std::string>();
}

const Json& object_of(const Json* value, std::string_view what) {
  static const Json kNone = Json::object();
  if (value == nullptr) return kNone;
  if (!value->is_object()) refuse(what, " is not an object");
  return *value;
}

const Json& list_of(const Json* value, std::string_view what) {
  if (value == nullptr || !value->is_array()) refuse(what, " is not a list");
  return *value;
}

std::optional<bool> flag_of(const Json& parameters, const char* key, const std::string& what) {
  const Json* const value = find(parameters, key);
  if (value == nullptr) return std::nullopt;
  if (!value->is_boolean()) refuse(what, " is not true or false");
  return value->get<bool>();
}

// Adds `given` to the message's `kept`, but for `own`, which is REST's alone.
void add_parameters(google::protobuf::Map<std::string, InferParameter>& kept, const Json& given,
                    std::string_view own) {
  for (const auto& [key, value] : given.items()) {
    if (key == own) continue;
    InferParameter& parameter = kept[key];
    if (value.is_boolean()) {
      parameter.set_bool_param(value.get<bool>());
    } else if (value.is_string()) {
      parameter.set_string_param(value.get<std::string>());
    } else if (is_int64(value)) {
      parameter.set_int64_param(value.get<std::int64_t>());
    } else if (value.is_number_unsigned()) {
      parameter.set_uint64_param(value.get<std::uint64_t>());
    } else if (value.is_number()) {
      parameter.set_double_param(value.get<double>());
    } else {
      refuse("parameter '", key, "' is not a string, a number, or true or false");
    }
  }
}

// Takes the inputs' binary data from a body, one after the other.
class BinaryReader {
 public:
  explicit BinaryReader(std::string_view rest) : rest_(rest) {}

  std::string_view take(const std::string& name, std::uint64_t size) {
    if (size > rest_.size()) {
      refuse("input '", name, "': binary_data_size is ", size, ", the body has ", rest_.size(),
             " bytes left");
    }
    const std::string_view taken = rest_.substr(0, size);
    rest_.remove_prefix(size);
    return taken;
  }

  void refuse_rest() const {
    if (rest_.empty()) return;
    refuse("the body has ", rest_.size(), " bytes behind the binary data of its inputs");
  }

 private:
  std::string_view rest_;
};

using Elements = std::vector<const Json*>;

[[noreturn]] void refuse_element(const std::string& name, std::size_t at, const char* what) {
  refuse("input '", name, "': element ", at, " of data is not ", what);
}

template <typename Number>
void add_number(Number number, std::string& contents) {
  char bytes[sizeof(Number)];
  std::memcpy(bytes, &number, sizeof(Number));
  contents.append(bytes, sizeof(Number));
}

void add_floats(const std::string& name, const Elements& elements, std::string& contents) {
  for (std::size_t at = 0; at < elements.size(); ++at) {
    const Json& one = *elements[at];
    if (one.is_null()) {
      add_number(std::numeric_limits<float>::quiet_NaN(), contents);
    } else if (one.is_number()) {
      add_number(static_cast<float>(one.get<double>()), contents);
    } else {
      refuse_element(name, at, "a number");
    }
  }
}

template <typename Number>
void add_integers(const std::string& name, const Elements& elements, std::string& contents) {
  for (std::size_t at = 0; at < elements.size(); ++at) {
    const Json& one = *elements[at];
    const std::int64_t number = is_int64(one) ? one.get<std::int64_t>() : 0;
    if (!is_int64(one) || number < std::numeric_limits<Number>::min() ||
        number > std::numeric_limits<Number>::max()) {
      refuse_element(
          name, at,
          sizeof(Number) == 4 ? "a whole number of 32 bits" : "a whole number of 64 bits");
    }
    add_number(static_cast<Number>(number), contents);
  }
}

void add_strings(const std::string& name, const Elements& elements, std::string& contents) {
  for (std::size_t at = 0; at < elements.size(); ++at) {
    if (!elements[at]->is_string()) refuse_element(name, at, "a string");
    const auto& one = elements[at]->get_ref<const std::string&>();
    add_number(static_cast<std::uint32_t>(one.size()), contents);
    contents += one;
  }
}

// The elements of `data` in their order, whether they are in one list or in one for each row.
Elements elements_of(const std::string& name, const Json& data,
                     const std::vector<std::int64_t>& shape) {
  const auto is_list = [](const Json& one) { return one.is_array(); };
  Elements elements;
  if (std::any_of(data.begin(), data.end(), is_list)) {
    const bool fits = shape.size() == 2 && data.size() == static_cast<std::uint64_t>(shape[0]) &&
                      std::all_of(data.begin(), data.end(), [&](const Json& row) {
                        return row.is_array() && row.size() == static_cast<std::uint64_t>(shape[1]);
                      });
    if (!fits) refuse("input '", name, "': the lists of data do not have its shape");
    for (const Json& row : data) {
      for (const Json& one : row) elements.push_back(&one);
    }
  } else {
    for (const Json& one : data) elements.push_back(&one);
  }
  const bool sized = (shape.size() == 1 || shape.size() == 2) &&
                     std::all_of(shape.begin(), shape.end(), [](std::int64_t size) {
                       return size >= 0 && size <= kLargestDimension;
                     });
  if (!sized) return elements;  // refused where gRPC's are
  const std::int64_t expected = shape.size() == 2 ? shape[0] * shape[1] : shape[0];
  if (static_cast<std::int64_t>(elements.size()) != expected) {
    refuse(name, " has ", elements.size(), " elements, its shape has ", expected);
  }
  return elements;
}

// The elements of `data` as raw contents; empty for a datatype that no model takes.
std::string contents_of(const std::string& name, std::string_view datatype, const Json& data,
                        const std::vector<std::int64_t>& shape) {
  if (!data.is_array()) refuse("input '", name, "': data is not a list");
  const Elements elements = elements_of(name, data, shape);
  std::string contents;
  if (datatype == "FP32") add_floats(name, elements, contents);
  if (datatype == "INT32") add_integers<std::int32_t>(name, elements, contents);
  if (datatype == "INT64") add_integers<std::int64_t>(name, elements, contents);
  if (datatype == "BYTES") add_strings(name, elements, contents);
  return contents;
}

// Whether a tensor's parameters say that it is in shared memory.
bool in_shared_memory(const Json& parameters) {
  return parameters.contains("shared_memory_region") ||
         parameters.contains("shared_memory_offset") ||
         parameters.contains("shared_memory_byte_size");
}

void add_input(const Json& given, std::size_t at, BinaryReader& reader,
               ModelInferRequest& message) {
  const std::string name = string_of(find(given, "name"), text("inputs[", at, "].name"));
  const std::string named = "input '" + name + "'";
  auto& tensor = *message.add_inputs();
  tensor.set_name(name);
  tensor.set_datatype(string_of(find(given, "datatype"), named + ": datatype"));
  const Json* const sizes = find(given, "shape");
  if (sizes == nullptr || !sizes->is_array() ||
      !std::all_of(sizes->begin(), sizes->end(), is_int64)) {
    refuse(named, ": shape is not a list of whole numbers");
  }
  const auto shape = sizes->get<std::vector<std::int64_t>>();
  tensor.mutable_shape()->Add(shape.begin(), shape.end());
  const Json& parameters = object_of(find(given, "parameters"), named + ": parameters");
  add_parameters(*tensor.mutable_parameters(), parameters, "binary_data_size");
  const Json* const data = find(given, "data");
  const bool placed = in_shared_memory(parameters);
  if (placed && (data != nullptr || parameters.contains("binary_data_size"))) {
    refuse(named, " has data and shared memory, expected only one of the two");
  }
  if (placed) return;
  if (const Json* const size = find(parameters, "binary_data_size"); size != nullptr) {
    if (data != nullptr) {
      refuse(named, " has data and binary_data_size, expected only one of the two");
    }
    if (!is_int64(*size) || size->get<std::int64_t>() < 0) {
      refuse(named, ": binary_data_size is not a whole number from 0 on");
    }
    message.add_raw_input_contents(std::string(reader.take(name, size->get<std::uint64_t>())));
  } else if (data != nullptr) {
    message.add_raw_input_contents(contents_of(name, tensor.datatype(), *data, shape));
  } else {
    refuse(named, " has neither data nor binary_data_size");
  }
}

void add_output(const Json& given, std::size_t at, RestEncodings& encodings,
                ModelInferRequest& message) {
  const std::string name = string_of(find(given, "name"), text("outputs[", at, "].name"));
  const std::string named = "output '" + name + "'";
  const Json& parameters = object_of(find(given, "parameters"), named + ": parameters");
  const auto binary = flag_of(parameters, "binary_data", named + ": parameter 'binary_data'");
  if (binary.has_value()) encodings.named[name] = *binary;
  auto& output = *message.add_outputs();
  output.set_name(name);
  add_parameters(*output.mutable_parameters(), parameters, "binary_data");
  if (in_shared_memory(parameters)) encodings.placed.insert(name);
}

void read_body(const Json& json, BinaryReader& reader, ModelInferRequest& message,
               RestEncodings& encodings) {
  if (!json.is_object()) refuse("the JSON is not an object");
  if (const Json* const id = find(json, "id"); id != nullptr) message.set_id(string_of(id, "id"));
  const Json& given = object_of(find(json, "parameters"), "parameters");
  encodings.all =
      flag_of(given, "binary_data_output", "parameter 'binary_data_output'").value_or(false);
  add_parameters(*message.mutable_parameters(), given, "binary_data_output");
  const Json& inputs = list_of(find(json, "inputs"), "inputs");
  for (std::size_t at = 0; at < inputs.size(); ++at) {
    add_input(object_of(&inputs[at], text("inputs[", at, "]")), at, reader, message);
  }
  reader.refuse_rest();
  const Json* const outputs = find(json, "outputs");
  if (outputs == nullptr) return;
  list_of(outputs, "outputs");
  for (std::size_t at = 0; at < outputs->size(); ++at) {
    add_output(object_of(&(*outputs)[at], text("outputs[", at, "]")), at, encodings, message);
  }
}

}  // namespace

Status read_rest_request(std::string_view body, std::optional<std::size_t> json_bytes,
                         const ModelPath& asked, RestRequest& request) {
  const std::size_t json_size = json_bytes.value_or(body.size());
  if (json_size > body.size()) {
    return Status::invalid(text("Inference-Header-Content-Length is ", json_size, ", the body has ",
                                body.size(), " bytes"));
  }
  Json json;
  if (Status status = read_rest_json(body.substr(0, json_size), json); !status.ok()) return status;
  ModelInferRequest message;
  message.set_model_name(asked.name);
  message.set_model_version(asked.version);
  BinaryReader reader(body.substr(json_size));
  try {
    read_body(json, reader, message, request.encodings);
  } catch (const BadBody& bad) {
    return Status::invalid(bad.what());
  }
  message.SerializeToString(&request.message);
  return {};
}

}  // namespace tessera
