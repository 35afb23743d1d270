#include "model/graph_operators.h"

#include <torch/csrc/jit/ir/ir.h>
#include <torch/csrc/jit/passes/inliner.h>

#include <memory>

#include "common/text.h"
#include "package/package_error.h"
#include "package/scripted_source.h"

namespace tessera {
namespace {

using torch::jit::AttributeKind;
using torch::jit::Block;
using torch::jit::Node;

// Adds the kinds of the nodes in `block` and in every graph inside of it.
void collect(const Block& block, std::set<std::string>& found) {
  for (const Node* const node : block.nodes()) {
    found.insert(node->kind().toQualString());
    for (const Block* const inner : node->blocks()) collect(*inner, found);
    for (const c10::Symbol name : node->attributeNames()) {
      if (node->kindOf(name) == AttributeKind::g) collect(*node->g(name)->block(), found);
      if (node->kindOf(name) != AttributeKind::gs) continue;
      for (const auto& graph : node->gs(name)) collect(*graph->block(), found);
    }
  }
}

}  // namespace

void check_operators(const torch::jit::Module& module, const std::string& path,
                     const std::set<std::string>& more) {
  std::set<std::string> found;
  for (const torch::jit::Method& method : module.get_methods()) {
    const std::shared_ptr<torch::jit::Graph> graph = method.graph()->copy();
    torch::jit::Inline(*graph);
    collect(*graph->block(), found);
  }
  for (const std::string& name : found) {
    if (is_allowed(name, more)) continue;
    if (name == "prim::CallMethod" || name == "prim::CallFunction") {
      throw PackageError(path, text("calls a method that is only known when it runs (", name,
                                    "), which no package may; package the model without "
                                    "interfaces and classes of torch.classes"));
    }
    throw PackageError(path, text("calls the operator ", name,
                                  ", which is not on the list of those that packages may call; if "
                                  "you trust the package, add --allow-op ",
                                  name));
  }
}

}  // namespace tessera
