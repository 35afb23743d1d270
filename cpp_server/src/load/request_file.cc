#include "load/request_file.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <fstream>

#include "common/flags.h"

namespace tessera {

std::vector<std::string> read_request_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) refuse_flag("requests", path, "it cannot be read");
  std::vector<std::string> requests;
  std::array<unsigned char, 4> prefix{};
  while (file.read(reinterpret_cast<char*>(prefix.data()), prefix.size())) {
    std::size_t size = 0;
    for (std::size_t byte = prefix.size(); byte > 0; --byte) size = size << 8U | prefix[byte - 1];
    std::string request;
    // Grown as it is read: a wrong size is found at the end of the file, not in an allocation.
    std::array<char, 65'536> part{};
    while (request.size() < size) {
      const auto wanted = std::min(part.size(), size - request.size());
      if (!file.read(part.data(), static_cast<std::streamsize>(wanted))) {
        refuse_flag("requests", path, "its last request is cut short");
      }
      request.append(part.data(), wanted);
    }
    requests.push_back(std::move(request));
  }
  if (file.gcount() != 0) refuse_flag("requests", path, "its last size is cut short");
  if (requests.empty()) refuse_flag("requests", path, "it has no request");
  return requests;
}

}  // namespace tessera
