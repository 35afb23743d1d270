#include "metrics/model_list.h"

namespace tessera {

std::shared_ptr<ModelMetrics> ModelList::add(const std::string& model, const std::string& version) {
  const MutexLock lock(mutex_);
  for (const auto& known : models_) {
    if (known->model == model && known->version == version) return known;
  }
  return models_.emplace_back(std::make_shared<ModelMetrics>(model, version));
}

void ModelList::remove(const ModelMetrics& metrics) {
  const MutexLock lock(mutex_);
  std::erase_if(models_, [&](const auto& known) { return known.get() == &metrics; });
}

std::shared_ptr<const ModelMetrics> ModelList::find(const std::string& model,
                                                    const std::string& version) const {
  const MutexLock lock(mutex_);
  for (const auto& known : models_) {
    if (known->model == model && known->version == version) return known;
  }
  return nullptr;
}

ModelList::All ModelList::all() const {
  const MutexLock lock(mutex_);
  return {models_.begin(), models_.end()};
}

}  // namespace tessera
