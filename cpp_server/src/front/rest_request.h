// A request for scores over REST, JSON with or without binary data behind it, as a
// ModelInferRequest.
//
// Everything that is asked of tensors, parameters and models is checked where gRPC's requests are;
// here is what JSON adds: keys and their types, and elements that must fit their datatype.
// docs/rest.md describes the bodies.
//
// Contract: a free function without state; any thread. What it takes is a few times the body.
#pragma once

#include <cstddef>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>

#include "common/status.h"
#include "front/rest_pages.h"

namespace tessera {

// Which outputs the client wants as binary data, and which in shared memory.
struct RestEncodings {
  bool all = false;  // those that are not in `named`
  std::map<std::string, bool, std::less<>> named;
  std::set<std::string, std::less<>> placed;

  bool binary(std::string_view output) const {
    const auto found = named.find(output);
    return found == named.end() ? all : found->second;
  }
};

struct RestRequest {
  std::string message;  // a serialised ModelInferRequest with raw contents
  RestEncodings encodings;
};

// Reads `body`, of which the first `json_bytes` (nothing: all) are JSON, into `request`.
Status read_rest_request(std::string_view body, std::optional<std::size_t> json_bytes,
                         const ModelPath& asked, RestRequest& request);

}  // namespace tessera
