// The calls about repositories between their messages and RepositoryControl: what gRPC and HTTP
// have in common.
//
// Contract: free functions without state; any thread; nothing blocks. `control` may be null: the
// server has no repository. `done` is called once, from any thread, perhaps before the call
// returns.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <variant>
#include <vector>

#include "common/status.h"
#include "front/server_facts.h"
#include "repository/control.h"

namespace tessera {

// The parameters of a call, by name: text, a whole number, or something else.
struct OtherParameter {};
using Parameter = std::variant<std::string, std::int64_t, OtherParameter>;
using Parameters = std::map<std::string, Parameter>;

// Every model and version, also those of a server without a repository.
std::vector<IndexEntry> index_entries(const ServerFacts& facts);

void call_load(RepositoryControl* control, const std::string& model, const Parameters& parameters,
               RepositoryControl::Done done);

void call_unload(RepositoryControl* control, const std::string& model, const Parameters& parameters,
                 RepositoryControl::Done done);

}  // namespace tessera
