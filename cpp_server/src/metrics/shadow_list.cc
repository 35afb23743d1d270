#include "metrics/shadow_list.h"

#include <algorithm>

namespace tessera {

std::string_view result_name(ShadowResult result) {
  switch (result) {
    case ShadowResult::kCompared: return "compared";
    case ShadowResult::kDropped: return "dropped";
    case ShadowResult::kFailed: return "failed";
  }
  return "unknown";
}

std::shared_ptr<ShadowMetrics> ShadowList::of(const std::string& model, const std::string& version,
                                              const std::string& shadow_version) {
  const MutexLock lock(mutex_);
  for (const auto& one : all_) {
    if (one->model == model && one->version == version && one->shadow_version == shadow_version) {
      return one;
    }
  }
  return all_.emplace_back(std::make_shared<ShadowMetrics>(model, version, shadow_version));
}

ShadowList::All ShadowList::both_in(const std::vector<IndexEntry>& entries) {
  const auto there = [&](const std::string& model, const std::string& version) {
    return std::any_of(entries.begin(), entries.end(), [&](const IndexEntry& entry) {
      return entry.model == model && entry.version == version;
    });
  };
  const MutexLock lock(mutex_);
  std::erase_if(all_, [&](const auto& one) {
    return !there(one->model, one->version) || !there(one->model, one->shadow_version);
  });
  return all_;
}

}  // namespace tessera
