// Requests of a package's schema, drawn at random, to be sent in turn.
//
// Contract: a free function; the same seed gives the same requests.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "load/request_drawer.h"

namespace tessera {

// Different requests: enough that caches and hashes see different ids.
inline constexpr std::size_t kRequests = 512;

inline std::vector<std::string> drawn_requests(const InputSchema& schema, const DrawOptions& draw,
                                               std::uint64_t seed) {
  RequestDrawer drawer(schema, draw, seed);
  std::vector<std::string> requests;
  while (requests.size() < kRequests) requests.push_back(drawer.draw());
  return requests;
}

}  // namespace tessera
