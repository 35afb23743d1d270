#include "model/registry.h"

#include <algorithm>
#include <utility>

#include "common/text.h"

namespace tessera {

Registry::Registry(std::vector<std::string> names)
    : names_(std::move(names)), slots_(names_.size()) {}

void Registry::publish(std::size_t index, std::unique_ptr<ServedModel> model) {
  Slot& slot = slots_.at(index);
  slot.owner = std::move(model);
  slot.model.store(slot.owner.get(), std::memory_order_release);
}

ServedModel* Registry::find(std::string_view name, std::string_view version, Status& status) const {
  std::size_t index = 0;
  if (!name.empty()) {
    index = this->index(name);
    if (index == names_.size()) {
      std::string known;
      for (const std::string& have : names_) known += (known.empty() ? "'" : ", '") + have + "'";
      status = {Code::kNotFound,
                text("model_name '", name, "' is unknown; this server has ", known)};
      return nullptr;
    }
  }
  ServedModel* const model = slots_[index].model.load(std::memory_order_acquire);
  if (model == nullptr) {
    status = {Code::kUnavailable, text("model '", names_[index], "' is still loading")};
    return nullptr;
  }
  if (!version.empty() && version != model->version()) {
    status = {Code::kNotFound, text("model_version '", version, "' of model '", names_[index],
                                    "' is not loaded; version '", model->version(), "' is")};
    return nullptr;
  }
  return model;
}

std::size_t Registry::index(std::string_view name) const {
  return static_cast<std::size_t>(std::find(names_.begin(), names_.end(), name) - names_.begin());
}

std::vector<ServedModel*> Registry::loaded() const {
  std::vector<ServedModel*> models;
  for (const Slot& slot : slots_) {
    ServedModel* const model = slot.model.load(std::memory_order_acquire);
    if (model != nullptr) models.push_back(model);
  }
  return models;
}

}  // namespace tessera
