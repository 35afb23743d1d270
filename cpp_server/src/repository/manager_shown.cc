// What others see of the repositories: each change is published as a whole.
#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "repository/manager.h"

namespace tessera {

// Requests, health checks, metrics and the index see `model` as it is now.
void RepositoryManager::publish(LiveModel& model) {
  registry_.put(model.name(), model.routes(), model.ready);
  watch();
  if (const bool serving = !model.ready.empty(); model.told_serving != serving) {
    model.told_serving = serving;
    listener_.serving(model.name(), serving);
  }
  for (const auto& metrics : list_.all()) {
    if (metrics->model != model.name()) continue;
    const std::optional<Version> version = parse_version(metrics->version);
    if (!version.has_value()) continue;
    if (!model.folder.versions.contains(*version) && !model.holds(*version)) {
      list_.remove(*metrics);
    }
  }
  show();
}

void RepositoryManager::show() {
  auto next = std::make_unique<Shown>();
  for (const auto& [name, model] : models_) {
    for (IndexEntry& entry : model->index()) next->entries.push_back(std::move(entry));
    LoadCount& count = next->counts.emplace_back(counts_[name]);
    count.model = name;
  }
  shown_.replace(std::move(next));
}

std::vector<IndexEntry> RepositoryManager::index() const {
  std::vector<IndexEntry> entries = shown_.read([](const Shown& shown) { return shown.entries; });
  for (IndexEntry& entry : entries) {
    if (entry.state == VersionState::kLoading) entry.progress = progress_;
    if (entry.state != VersionState::kReady) continue;
    const auto metrics = list_.find(entry.model, entry.version);
    if (metrics == nullptr || !metrics->follow.followed) continue;
    entry.commit = metrics->follow.commit;
    if (entry.reason.empty()) entry.reason = metrics->follow.trouble();
  }
  for (const auto& [name, version] : fixed_) {
    Status status;
    const bool ready = registry_.find(name, "", status) != nullptr;
    IndexEntry& entry = entries.emplace_back();
    entry.model = name;
    entry.version = version;
    entry.state = ready ? VersionState::kReady : VersionState::kLoading;
  }
  std::stable_sort(entries.begin(), entries.end(),
                   [](const IndexEntry& a, const IndexEntry& b) { return a.model < b.model; });
  return entries;
}

std::vector<LoadCount> RepositoryManager::load_counts() const {
  return shown_.read([](const Shown& shown) { return shown.counts; });
}

}  // namespace tessera
