// The models that a server has, by the name that requests use, and which version of them answers a
// request.
//
// Everything that a request looks at is one immutable snapshot behind one pointer. A request takes
// shared ownership of its version there and is answered by it, whatever is published meanwhile.
//
// Contract: find, shadow, names, loaded and ready may be called from any thread and do not block.
// What changes the registry may be called from any thread, and blocks for microseconds. Models are
// destroyed by whoever gives up the last share of them, so whoever published one keeps a share of
// its own until it is the last (use_count): destroying a model takes long.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "common/mutex.h"
#include "common/published.h"
#include "common/status.h"
#include "model/served_model.h"
#include "repository/routes.h"

namespace tessera {

class Registry {
 public:
  using Ready = std::map<Version, std::shared_ptr<ServedModel>>;

  // The names of --model, the default one first, all different. They are known before their models
  // are loaded.
  explicit Registry(std::vector<std::string> fixed);

  // Every model's name, those of --model first.
  std::vector<std::string> names() const;

  // The model called `name`, one of --model, answers from now on.
  void publish(const std::string& name, std::shared_ptr<ServedModel> model);

  // From now on the model `name` of a repository has these versions, one for each that `routes`
  // may choose.
  void put(const std::string& name, Routes routes, Ready ready);

  // There is no model `name` in a repository any more.
  void remove(const std::string& name);

  // The model that a request asks for; of a repository's, the one that `version` (a number, a label
  // or nothing) and `key`, which decides between shares, lead to. An empty name is the first of
  // --model, or the only model. Null: `status` says why (NOT_FOUND, or UNAVAILABLE while it loads).
  std::shared_ptr<ServedModel> find(std::string_view name, std::string_view version,
                                    std::string_view key, Status& status) const;

  // The same without a key.
  std::shared_ptr<ServedModel> find(std::string_view name, std::string_view version,
                                    Status& status) const {
    return find(name, version, {}, status);
  }

  // The version that computes the calls of `key` to the model `name`, too, and never answers them.
  std::shared_ptr<ServedModel> shadow(std::string_view name, std::string_view key) const;

  // Every version that answers, in the order of names() and of versions.
  std::vector<std::shared_ptr<ServedModel>> loaded() const;

  // Whether repositories still have loads of the start to end; false before it is called.
  void set_starting(bool starting) { starting_ = starting; }

  // Whether each of --model answers, and each load of the start has ended.
  bool ready() const;

 private:
  struct Entry {
    std::shared_ptr<ServedModel> fixed;  // of --model; null until it is loaded
    std::optional<Routes> routes;        // of a repository
    Ready ready;
  };
  using Models = std::map<std::string, std::shared_ptr<const Entry>, std::less<>>;

  template <typename Change>
  void replace(const Change& change);
  static std::vector<std::string> names_of(const Models& models,
                                           const std::vector<std::string>& fixed);
  Models::const_iterator model_of(const Models& models, std::string_view name,
                                  Status& status) const;

  const std::vector<std::string> fixed_;
  std::atomic<bool> starting_ = false;
  Mutex writing_;
  Published<Models> published_;
};

}  // namespace tessera
