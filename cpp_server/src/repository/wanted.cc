#include "repository/wanted.h"

#include <algorithm>
#include <utility>

namespace tessera {
namespace {

// Leaves those of `candidates` that `choice` names.
std::set<Version> chosen(std::set<Version> candidates, const VersionChoice& choice) {
  switch (choice.kind) {
    case VersionChoice::Kind::kAll: break;
    case VersionChoice::Kind::kLatest:
      while (static_cast<std::int64_t>(candidates.size()) > choice.latest) {
        candidates.erase(candidates.begin());
      }
      break;
    case VersionChoice::Kind::kList:
      std::erase_if(candidates, [&](Version version) {
        return !std::binary_search(choice.list.begin(), choice.list.end(), version);
      });
      break;
  }
  return candidates;
}

bool is_ready(const VersionStates& states, Version version) {
  const auto found = states.find(version);
  return found != states.end() && found->second.state == VersionState::kReady;
}

// Whether `file` should be loaded as the version that stands as `status`; where that is so later,
// `again` is when.
bool needs_load(const VersionStatus& status, const Fingerprint& file, bool retry, TimePoint now,
                TimePoint& again) {
  const VersionState state = status.state;
  if (state == VersionState::kLoading || state == VersionState::kUnloading) return false;
  if (state == VersionState::kReady && status.loaded == file) return false;
  if (status.failures == 0 || status.failed != file) return true;
  if (!retry) return false;
  const TimePoint due = status.failed_at + load_backoff(status.failures);
  if (due <= now) return true;
  again = std::min(again, due);
  return false;
}

}  // namespace

bool Wanted::shadow_alone(Version version) const {
  if (!shadow || shadow->version != version || added.contains(version)) return false;
  return std::none_of(labels.begin(), labels.end(),
                      [&](const auto& label) { return label.second == version; });
}

Wanted wanted_versions(const std::set<Version>& present, const ServingConfig& config,
                       const ControlRecord& record) {
  Wanted wanted{.versions = {},
                .may_be_none = record.unloaded || !record.remove.empty(),
                .labels = record.labels,
                .traffic = config.traffic,
                .shadow = config.shadow};
  wanted.labels.insert(config.labels.begin(), config.labels.end());  // where the record has none
  if (record.unloaded) {
    wanted.shadow.reset();
    return wanted;
  }
  wanted.added = record.add;
  std::set<Version> candidates = present;
  std::erase_if(candidates, [&](Version version) {
    return record.remove.contains(version) || wanted.shadow_alone(version);
  });
  wanted.versions = chosen(std::move(candidates), config.versions);
  wanted.versions.insert(record.add.begin(), record.add.end());
  for (const auto& [label, version] : wanted.labels) wanted.versions.insert(version);
  if (wanted.shadow) wanted.versions.insert(wanted.shadow->version);
  return wanted;
}

Wanted nothing_wanted() {
  Wanted wanted;
  wanted.may_be_none = true;
  return wanted;
}

Duration load_backoff(int failures) {
  constexpr std::chrono::seconds kMost{60};
  constexpr int kDoublings = 6;  // 2^6 s is more than the most
  const int doublings = std::clamp(failures - 1, 0, kDoublings);
  return std::min(kMost, std::chrono::seconds(std::int64_t{1} << doublings));
}

std::optional<Version> answering_version(const Wanted& wanted, const std::set<Version>& ready) {
  const auto stable = wanted.labels.find(kStableLabel);
  if (stable != wanted.labels.end() && ready.contains(stable->second)) return stable->second;
  const auto found = std::find_if_not(
      ready.rbegin(), ready.rend(), [&](Version version) { return wanted.shadow_alone(version); });
  return found == ready.rend() ? std::nullopt : std::optional(*found);
}

std::vector<Version> first_to_load(const Wanted& wanted) {
  std::vector<Version> order(wanted.versions.rbegin(), wanted.versions.rend());
  if (const auto stable = wanted.labels.find(kStableLabel); stable != wanted.labels.end()) {
    const auto at = std::find(order.begin(), order.end(), stable->second);
    if (at != order.end()) std::rotate(order.begin(), at, at + 1);
  }
  return order;
}

Plan plan_model(const Wanted& wanted, const std::map<Version, Fingerprint>& present,
                const VersionStates& states, bool retry, TimePoint now) {
  Plan plan;
  for (const Version version : first_to_load(wanted)) {
    const auto file = present.find(version);
    const auto status = states.find(version);
    if (file == present.end()) continue;
    if (!needs_load(status == states.end() ? VersionStatus{} : status->second, file->second, retry,
                    now, plan.again)) {
      continue;
    }
    plan.load = version;
    break;
  }
  const bool others_may_go =
      (!wanted.versions.empty() || wanted.may_be_none) &&
      std::all_of(wanted.versions.begin(), wanted.versions.end(),
                  [&](Version version) { return is_ready(states, version); });
  for (const auto& [version, status] : states) {
    if (status.state != VersionState::kReady || wanted.versions.contains(version)) continue;
    if (status.dropped || others_may_go) plan.retire.insert(version);
  }
  return plan;
}

}  // namespace tessera
