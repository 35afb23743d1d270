// Prints what the reader of manifests says of each in a file: an empty line where it takes it.
// Before each stands its number of bytes, 8 of them, little-endian. For
// tests/packaging/test_edge_values.py.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <iostream>
#include <iterator>
#include <span>
#include <stdexcept>
#include <string>

#include "package/manifest.h"

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  std::ifstream file(argv[1], std::ios::binary);
  const std::string all{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  for (std::size_t at = 0; at + 8 <= all.size();) {
    std::uint64_t bytes = 0;
    std::memcpy(&bytes, all.data() + at, sizeof(bytes));
    const auto content = std::as_bytes(std::span(all).subspan(at + 8, bytes));
    at += 8 + bytes;
    try {
      tessera::parse_manifest(content);
      std::cout << '\n';
    } catch (const std::invalid_argument& error) {
      std::cout << error.what() << '\n';
    }
  }
  return 0;
}
