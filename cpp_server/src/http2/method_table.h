// The methods of a server by their paths, "/package.Service/Method".
//
// Contract: filled before any connection uses it; then any thread, nothing blocks.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "http2/call.h"

namespace tessera::http2 {

class MethodTable {
 public:
  enum class Access { kGuarded, kOpen };  // kOpen: no CallGate is asked

  void add(std::string path, std::unique_ptr<Method> method, Access access = Access::kGuarded) {
    method->guarded_ = access == Access::kGuarded;
    methods_.emplace(std::move(path), std::move(method));
  }

  // Null: there is no such method.
  Method* find(std::string_view path) const {
    const auto found = methods_.find(path);
    return found == methods_.end() ? nullptr : found->second.get();
  }

 private:
  struct Hash {
    using is_transparent = void;
    std::size_t operator()(std::string_view text) const {
      return std::hash<std::string_view>()(text);
    }
  };
  std::unordered_map<std::string, std::unique_ptr<Method>, Hash, std::equal_to<>> methods_;
};

}  // namespace tessera::http2
