// What becomes of a request for which the system has no memory: it alone is refused.
//
// Contract: free functions without state; any thread.
#pragma once

#include <exception>
#include <new>
#include <string_view>

#include "common/status.h"

namespace tessera {

// Whether `failure` says that memory could not be had. The standard library has an exception for
// it; what torch throws has passed through TorchScript's interpreter, which leaves the text alone.
inline bool out_of_memory(const std::exception& failure) {
  if (dynamic_cast<const std::bad_alloc*>(&failure) != nullptr) return true;
  const std::string_view text = failure.what();
  for (const std::string_view sign : {"not enough memory", "out of memory", "std::bad_alloc"}) {
    if (text.find(sign) != std::string_view::npos) return true;
  }
  return false;
}

inline Status out_of_memory_status() {
  return {Code::kResourceExhausted,
          "the server has no memory left for this request; try again later"};
}

}  // namespace tessera
