// Reading a safetensors file (https://github.com/huggingface/safetensors, "Format"): eight
// bytes with the header's length, a JSON header, then the tensors' bytes.
//
// Contract: the views borrow the content given, which must outlive them. Nothing blocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

namespace tessera {

struct TensorView {
  std::string dtype;  // safetensors' own name: "F32", "I32", "I64"
  std::vector<std::int64_t> shape;
  std::span<const std::byte> bytes;  // little-endian, row-major; not aligned
};

// Every tensor by name. Throws std::invalid_argument when the content is not such a file.
std::map<std::string, TensorView> read_safetensors(std::span<const std::byte> content);

}  // namespace tessera
