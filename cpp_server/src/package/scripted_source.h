// What of a package's TorchScript source would run while torch opens the archive, and is it
// harmless? serving/package/scripted_source.py has the rules and their reasons; both readers decide
// alike.
//
// Contract: a free function without state; any thread; nothing blocks.
#pragma once

#include <cstddef>
#include <set>
#include <span>
#include <string>

namespace tessera {

// Throws std::invalid_argument, naming the line, where a `code/*.py` record could do anything while
// it is opened but set attributes and call operators of kAllowedOperators or `more`, or is not laid
// out as torch prints sources.
void check_source(std::span<const std::byte> content, const std::set<std::string>& more);

// Whether a graph may call the operator `name` ("aten::add").
bool is_allowed(const std::string& name, const std::set<std::string>& more);

}  // namespace tessera
