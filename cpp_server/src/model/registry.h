// The models that a server has, by the name that requests use, and which of them answers a request.
//
// Everything that a request looks at is one immutable snapshot behind one pointer. A request takes
// shared ownership of its model there and is answered by it, whatever is published meanwhile.
//
// Contract: find, names, loaded and ready may be called from any thread and do not block. What
// changes the registry may be called from any thread, and blocks for microseconds. Models are
// destroyed by whoever gives up the last share of them, so whoever published one keeps its own
// share until it is the last (use_count): destroying a model takes long.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "common/mutex.h"
#include "common/published.h"
#include "common/status.h"
#include "model/served_model.h"

namespace tessera {

class Registry {
 public:
  // The names of --model, the default one first, all different. They are known before their models
  // are loaded.
  explicit Registry(std::vector<std::string> fixed);

  // Every model's name, those of --model first.
  std::vector<std::string> names() const;

  // The model called `name`, one of --model, answers from now on.
  void publish(const std::string& name, std::shared_ptr<ServedModel> model);

  // The model that a request asks for. An empty name is the first of --model. Null: `status` says
  // why (NOT_FOUND, or UNAVAILABLE while it loads).
  std::shared_ptr<ServedModel> find(std::string_view name, std::string_view version,
                                    Status& status) const;

  // The models that answer, in the order of names().
  std::vector<std::shared_ptr<ServedModel>> loaded() const;

  // Whether each of --model answers.
  bool ready() const;

 private:
  // One of --model: null until it is loaded.
  using Models = std::map<std::string, std::shared_ptr<ServedModel>, std::less<>>;

  static std::shared_ptr<ServedModel> find_in(const Models& models,
                                              const std::vector<std::string>& names,
                                              std::string_view name, std::string_view version,
                                              Status& status);

  const std::vector<std::string> fixed_;
  mutable Mutex writing_;
  Published<Models> published_;
};

}  // namespace tessera
