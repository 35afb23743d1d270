#include "model/registry.h"

#include <utility>

#include "common/text.h"

namespace tessera {

Registry::Registry(std::vector<std::string> fixed)
    : fixed_(std::move(fixed)), published_([this] {
        auto models = std::make_unique<Models>();
        for (const std::string& name : fixed_) models->emplace(name, nullptr);
        return models;
      }()) {}

std::vector<std::string> Registry::names() const { return fixed_; }

void Registry::publish(const std::string& name, std::shared_ptr<ServedModel> model) {
  const MutexLock lock(writing_);
  auto next = published_.read([](const Models& now) { return std::make_unique<Models>(now); });
  next->at(name) = std::move(model);
  published_.replace(std::move(next));
}

std::shared_ptr<ServedModel> Registry::find(std::string_view name, std::string_view version,
                                            Status& status) const {
  return published_.read(
      [&](const Models& models) { return find_in(models, fixed_, name, version, status); });
}

std::shared_ptr<ServedModel> Registry::find_in(const Models& models,
                                               const std::vector<std::string>& names,
                                               std::string_view name, std::string_view version,
                                               Status& status) {
  const auto found = models.find(name.empty() ? std::string_view(names.front()) : name);
  if (found == models.end()) {
    std::string known;
    for (const std::string& have : names) known += (known.empty() ? "'" : ", '") + have + "'";
    status = {Code::kNotFound, text("model_name '", name, "' is unknown; this server has ", known)};
    return nullptr;
  }
  const auto& [own_name, model] = *found;
  if (model == nullptr) {
    status = {Code::kUnavailable, text("model '", own_name, "' is still loading")};
    return nullptr;
  }
  if (!version.empty() && version != model->version()) {
    status = {Code::kNotFound, text("model_version '", version, "' of model '", own_name,
                                    "' is not loaded; version '", model->version(), "' is")};
    return nullptr;
  }
  return model;
}

std::vector<std::shared_ptr<ServedModel>> Registry::loaded() const {
  return published_.read([this](const Models& models) {
    std::vector<std::shared_ptr<ServedModel>> all;
    for (const std::string& name : fixed_) {
      if (const auto& model = models.at(name); model != nullptr) all.push_back(model);
    }
    return all;
  });
}

bool Registry::ready() const { return loaded().size() == fixed_.size(); }

}  // namespace tessera
