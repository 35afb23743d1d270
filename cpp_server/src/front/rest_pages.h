// What REST tells of the server and its models: every path below /v2 that is asked with GET. They
// are the KServe protocol's calls over gRPC in another encoding: KserveMetadata answers the same
// messages, and what a message has becomes a key of a JSON object. docs/rest.md and
// docs/openapi.yaml have the paths.
//
// Contract: free functions without state; any thread; nothing blocks.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "front/http_page.h"
#include "front/server_facts.h"

namespace tessera {

// A path that names a model: /v2/models/NAME[/versions/VERSION][/VERB]; what is left out is empty.
struct ModelPath {
  std::string name;
  std::string version;
  std::string verb;
};

// What `path`, as it stands in a request, names; nothing: it is not a model's. What it names need
// not be UTF-8.
std::optional<ModelPath> read_model_path(std::string_view path);

// `part` of a path with its %-escapes replaced; what is not one stays.
std::string unquoted(std::string_view part);

// Whether `path` is REST's.
bool is_rest_path(std::string_view path);

// The answer to GET of a path of REST's.
HttpAnswer rest_page(const ServerFacts& facts, const std::string& path);

// Answers POST of a path that does not ask for scores. What `facts` refers to outlives every call
// of `done`.
void answer_rest_post(const ServerFacts& facts, const HttpRequest& request, HttpDone done);

}  // namespace tessera
