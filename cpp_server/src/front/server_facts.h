// What a server tells of itself and of its models.
//
// Contract: the references outlive whoever is told; `draining` may be called from any thread.
#pragma once

#include <functional>
#include <string>

#include "common/clock.h"
#include "model/registry.h"
#include "repository/control.h"
#include "request/shared_memory.h"

namespace tessera {

struct ServerFacts {
  const Registry& registry;
  const Clock& clock;
  std::string version;
  std::function<bool()> draining;
  RepositoryControl* repository = nullptr;  // null: there is none
  SharedMemory* shared_memory = nullptr;    // null: the calls about it are not answered
};

}  // namespace tessera
