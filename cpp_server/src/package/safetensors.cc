#include "package/safetensors.h"

#include <cstring>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "common/text.h"

namespace tessera {
namespace {

using Json = nlohmann::json;

std::uint64_t dtype_bytes(const std::string& dtype) {
  if (dtype == "F32" || dtype == "I32") return 4;
  if (dtype == "I64") return 8;
  throw std::invalid_argument("dtype '" + dtype + "' is not read here");
}

TensorView read_entry(const Json& entry, std::span<const std::byte> data) {
  TensorView view;
  view.dtype = entry.at("dtype").get<std::string>();
  view.shape = entry.at("shape").get<std::vector<std::int64_t>>();
  const auto offsets = entry.at("data_offsets").get<std::vector<std::uint64_t>>();
  if (offsets.size() != 2 || offsets[0] > offsets[1] || offsets[1] > data.size()) {
    throw std::invalid_argument("data_offsets lie outside the file");
  }
  view.bytes = data.subspan(offsets[0], offsets[1] - offsets[0]);
  // Divides the size down instead of multiplying up, which could overflow.
  std::uint64_t left = view.bytes.size() / dtype_bytes(view.dtype);
  bool fits = view.bytes.size() % dtype_bytes(view.dtype) == 0;
  bool empty = false;
  for (const std::int64_t size : view.shape) {
    if (size < 0) throw std::invalid_argument("a shape is negative");
    if (size == 0) {
      empty = true;
    } else {
      fits = fits && left % static_cast<std::uint64_t>(size) == 0;
      left /= static_cast<std::uint64_t>(size);
    }
  }
  fits = fits && (empty ? view.bytes.empty() : left == 1);
  if (!fits) throw std::invalid_argument("a shape does not fit its bytes");
  return view;
}

}  // namespace

std::map<std::string, TensorView> read_safetensors(std::span<const std::byte> content) {
  std::uint64_t header_bytes = 0;
  if (content.size() < sizeof(header_bytes)) throw std::invalid_argument("too short");
  std::memcpy(&header_bytes, content.data(), sizeof(header_bytes));
  content = content.subspan(sizeof(header_bytes));
  if (header_bytes > content.size()) throw std::invalid_argument("the header is cut short");
  const auto* const begin = reinterpret_cast<const char*>(content.data());
  const auto data = content.subspan(header_bytes);
  std::map<std::string, TensorView> tensors;
  try {
    const Json header = Json::parse(begin, begin + header_bytes);
    for (const auto& item : header.items()) {
      if (item.key() == "__metadata__") continue;
      tensors.emplace(item.key(), read_entry(item.value(), data));
    }
  } catch (const Json::exception& error) {
    throw std::invalid_argument(text("the header cannot be read: ", error.what()));
  }
  return tensors;
}

}  // namespace tessera
