// Which operators a package's graph calls, before it is called. Included by files that are compiled
// against torch.
//
// Contract: a free function without state; blocks for as long as inlining the graph takes.
#pragma once

#include <torch/csrc/jit/api/module.h>

#include <set>
#include <string>

namespace tessera {

// Throws PackageError naming `path` and the first operator, in alphabetical order, that a method of
// `module` calls, or anything that it calls, and that neither kAllowedOperators nor `more` has.
void check_operators(const torch::jit::Module& module, const std::string& path,
                     const std::set<std::string>& more);

}  // namespace tessera
