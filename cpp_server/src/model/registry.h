// The models that a server has, by the name that requests use. A name is known before its
// model is loaded.
//
// Contract: the names are fixed at construction. publish is called once per name by the
// loading thread; find and ready may be called from any thread meanwhile. Nothing blocks.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "common/status.h"
#include "model/served_model.h"

namespace tessera {

class Registry {
 public:
  // Every model's name, the default one first; at least one, all different.
  explicit Registry(std::vector<std::string> names);

  const std::vector<std::string>& names() const { return names_; }

  // The model `index` of the names answers from now on.
  void publish(std::size_t index, std::unique_ptr<ServedModel> model);

  // The model that a request asks for: an empty name is the default one, an empty version
  // whichever is loaded. Null: `status` says why (NOT_FOUND, or UNAVAILABLE while it loads).
  ServedModel* find(std::string_view name, std::string_view version, Status& status) const;

  // The place of `name` among the names; their number where it is none of them.
  std::size_t index(std::string_view name) const;

  // The models that answer.
  std::vector<ServedModel*> loaded() const;

  bool ready() const { return loaded().size() == names_.size(); }

 private:
  struct Slot {
    std::unique_ptr<ServedModel> owner;  // the loading thread's, until the pointer is published
    std::atomic<ServedModel*> model = nullptr;
  };

  std::vector<std::string> names_;
  std::vector<Slot> slots_;
};

}  // namespace tessera
