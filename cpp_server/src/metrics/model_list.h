// The counters of every version of every model that the server shows: those that are loaded, and
// those that could be.
//
// Contract: any thread; what is called blocks for microseconds. Counters stay valid for as long as
// somebody holds them.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "common/mutex.h"
#include "metrics/model_metrics.h"

namespace tessera {

class ModelList {
 public:
  using All = std::vector<std::shared_ptr<const ModelMetrics>>;

  // The counters of `version` of `model`, from now on shown; those that are shown already, if any.
  std::shared_ptr<ModelMetrics> add(const std::string& model, const std::string& version);

  // The counters of `version` of `model`; null: they are not shown.
  std::shared_ptr<const ModelMetrics> find(const std::string& model,
                                           const std::string& version) const;

  // They are shown no more.
  void remove(const ModelMetrics& metrics);

  // In the order in which they were added.
  All all() const;

 private:
  mutable Mutex mutex_;
  std::vector<std::shared_ptr<ModelMetrics>> models_ TESSERA_GUARDED_BY(mutex_);
};

}  // namespace tessera
