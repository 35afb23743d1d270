#include "model/registry.h"

#include <algorithm>
#include <utility>

#include "common/text.h"

namespace tessera {

Registry::Registry(std::vector<std::string> fixed)
    : fixed_(std::move(fixed)), published_([this] {
        auto models = std::make_unique<Models>();
        for (const std::string& name : fixed_) models->emplace(name, std::make_shared<Entry>());
        return models;
      }()) {}

std::vector<std::string> Registry::names_of(const Models& models,
                                            const std::vector<std::string>& fixed) {
  std::vector<std::string> names = fixed;
  for (const auto& [name, entry] : models) {
    if (entry->routes.has_value()) names.push_back(name);
  }
  return names;
}

std::vector<std::string> Registry::names() const {
  return published_.read([this](const Models& models) { return names_of(models, fixed_); });
}

template <typename Change>
void Registry::replace(const Change& change) {
  const MutexLock lock(writing_);
  auto next = published_.read([](const Models& now) { return std::make_unique<Models>(now); });
  change(*next);
  published_.replace(std::move(next));
}

void Registry::publish(const std::string& name, std::shared_ptr<ServedModel> model) {
  auto entry = std::make_shared<Entry>();
  entry->fixed = std::move(model);
  replace([&](Models& models) { models.at(name) = std::move(entry); });
}

void Registry::put(const std::string& name, Routes routes, Ready ready) {
  auto entry = std::make_shared<Entry>();
  entry->routes = std::move(routes);
  entry->ready = std::move(ready);
  replace([&](Models& models) { models[name] = std::move(entry); });
}

void Registry::remove(const std::string& name) {
  replace([&](Models& models) { models.erase(name); });
}

Registry::Models::const_iterator Registry::model_of(const Models& models, std::string_view name,
                                                    Status& status) const {
  if (name.empty() && !fixed_.empty()) name = fixed_.front();
  if (name.empty() && models.size() == 1) return models.begin();
  const auto found = models.find(name);
  if (found != models.end()) return found;
  std::string known;
  for (const std::string& have : names_of(models, fixed_)) {
    known += (known.empty() ? "'" : ", '") + have + "'";
  }
  if (known.empty()) known = "no model";
  status = {Code::kNotFound,
            name.empty() ? text("model_name is empty; name a model, this server has ", known)
                         : text("model_name '", name, "' is unknown; this server has ", known)};
  return found;
}

std::shared_ptr<ServedModel> Registry::find(std::string_view name, std::string_view version,
                                            std::string_view key, Status& status) const {
  return published_.read([&](const Models& models) -> std::shared_ptr<ServedModel> {
    const auto found = model_of(models, name, status);
    if (found == models.end()) return nullptr;
    const Entry& entry = *found->second;
    if (entry.routes.has_value()) {
      Routes::Choice choice = entry.routes->choose(version, key);
      if (choice.version.has_value()) return entry.ready.at(*choice.version);
      status = std::move(choice.status);
      return nullptr;
    }
    if (entry.fixed == nullptr) {
      status = {Code::kUnavailable, text("model '", found->first, "' is still loading")};
      return nullptr;
    }
    if (!version.empty() && version != entry.fixed->version()) {
      status = {Code::kNotFound,
                text("model_version '", version, "' of model '", found->first,
                     "' is not loaded; version '", entry.fixed->version(), "' is")};
      return nullptr;
    }
    return entry.fixed;
  });
}

std::shared_ptr<ServedModel> Registry::shadow(std::string_view name, std::string_view key) const {
  return published_.read([&](const Models& models) -> std::shared_ptr<ServedModel> {
    const auto found = models.find(name);
    if (found == models.end() || !found->second->routes.has_value()) return nullptr;
    const std::optional<Version> version = found->second->routes->shadow(key);
    return version.has_value() ? found->second->ready.at(*version) : nullptr;
  });
}

std::vector<std::shared_ptr<ServedModel>> Registry::loaded() const {
  return published_.read([this](const Models& models) {
    std::vector<std::shared_ptr<ServedModel>> all;
    for (const std::string& name : names_of(models, fixed_)) {
      const Entry& entry = *models.find(name)->second;
      if (entry.fixed != nullptr) all.push_back(entry.fixed);
      for (const auto& [version, model] : entry.ready) all.push_back(model);
    }
    return all;
  });
}

bool Registry::ready() const {
  if (starting_) return false;
  return published_.read([this](const Models& models) {
    return std::all_of(fixed_.begin(), fixed_.end(), [&](const std::string& name) {
      return models.find(name)->second->fixed != nullptr;
    });
  });
}

}  // namespace tessera
