// The thread that looks at the logs of all followed versions, in turn, and takes what has come.
//
// Contract: watch and stop may be called from any thread; stop blocks until the step that is being
// taken is done. The thread has a share of a model only while it takes a step of it, and takes none
// of a model once watch has returned without it: who waits for the last share sees it go for good.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "common/clock.h"
#include "common/mutex.h"
#include "model/served_model.h"
#include "server/log.h"

namespace tessera {

class Follower {
 public:
  // Called where a version has to be loaded again, from the follower's thread; must not block.
  using Reload = std::function<void(const std::string& model, const std::string& version)>;

  // Looks every `interval`, and again at once where something was taken.
  Follower(Duration interval, Reload reload, const Log& log);
  ~Follower();

  // From now on these are looked at, and no others.
  void watch(std::vector<std::weak_ptr<ServedModel>> models);

  void stop();

 private:
  void run();
  // Null: it is not to be looked at any more.
  std::shared_ptr<ServedModel> share_of(const std::weak_ptr<ServedModel>& known);
  // Whether a step was taken.
  bool look(ServedModel& model) const;

  const Duration interval_;
  const Reload reload_;
  const Log& log_;
  Mutex mutex_;
  Condition changed_;
  std::vector<std::weak_ptr<ServedModel>> models_ TESSERA_GUARDED_BY(mutex_);
  bool stopped_ TESSERA_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace tessera
