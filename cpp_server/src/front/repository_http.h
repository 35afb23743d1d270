// The calls about repositories over HTTP: POST /v2/repository/index and
// /v2/repository/models/NAME/load and .../unload, with JSON bodies; docs/repository.md has them.
//
// Contract: any thread; nothing blocks. What `facts` refers to outlives every call of `done`.
#pragma once

#include <string>
#include <string_view>

#include "front/http_page.h"
#include "front/server_facts.h"

namespace tessera {

// Whether `path` is one of these.
bool is_repository_path(std::string_view path);

// Another path is answered with 404.
void answer_repository_post(const ServerFacts& facts, const HttpRequest& request, HttpDone done);

// The HTTP status that stands for an outcome.
int http_status_of(Code code);

}  // namespace tessera
