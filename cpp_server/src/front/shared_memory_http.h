// The calls about shared memory over HTTP, below /v2/systemsharedmemory: docs/kserve.md has them.
//
// Contract: any thread; nothing blocks. `facts` has shared memory.
#pragma once

#include <string>
#include <string_view>

#include "front/http_page.h"
#include "front/server_facts.h"

namespace tessera {

bool is_shared_memory_path(std::string_view path);

// The answer to GET.
HttpAnswer shared_memory_page(const ServerFacts& facts, const std::string& path);

// The answer to POST.
HttpAnswer answer_shared_memory_post(const ServerFacts& facts, const HttpRequest& request);

}  // namespace tessera
