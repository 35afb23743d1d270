// The status page: what happened in the last minute, from snapshots taken every second, and how
// fresh the followed versions were in the last ten.
//
// Contract: one thread (the HTTP port's) calls tick and page; the list outlives the page.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "common/clock.h"
#include "metrics/model_list.h"
#include "metrics/model_metrics.h"
#include "repository/control.h"

namespace tessera {

class StatusPage {
 public:
  StatusPage(const ModelList& models, const Clock& clock);

  // Takes a snapshot of every model that is shown; to be called about once a second.
  void tick();

  // The page as HTML. `state` is "loading", "ready" or "draining", `versions` what repositories
  // hold.
  std::string page(const std::string& state, const std::string& version,
                   const std::vector<IndexEntry>& versions) const;

 private:
  struct Snapshot {
    TimePoint time{};
    std::vector<std::uint64_t> durations;
    std::uint64_t failures = 0;
  };

  static Snapshot snapshot(const ModelMetrics& model, TimePoint now);
  std::string row(const ModelMetrics& model, const Snapshot& past, TimePoint now) const;

  // How old the newest training example of a followed version's state was, seconds.
  struct Freshness {
    TimePoint time{};
    double seconds = 0;
  };
  static std::string freshness(const ModelMetrics& model, const std::deque<Freshness>& points,
                               TimePoint now);
  void note_freshness(TimePoint now);

  // The oldest first; of a model that has just begun to be shown, none.
  using Snapshots = std::deque<Snapshot>;

  const ModelList& models_;
  std::map<std::shared_ptr<const ModelMetrics>, Snapshots> snapshots_;
  std::map<std::shared_ptr<const ModelMetrics>, std::deque<Freshness>> freshness_;
  const Clock& clock_;
  TimePoint began_;
};

// `text` with HTML's own characters replaced.
std::string html_escaped(const std::string& text);

}  // namespace tessera
