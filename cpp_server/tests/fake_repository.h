// A repository for the pages that show one.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "repository/control.h"

namespace tessera::test {

// One version that loads, one that could not be loaded, and a model without any.
class FakeRepository final : public RepositoryControl {
 public:
  std::vector<IndexEntry> index() const override {
    return {{.model = "empty"},
            {.model = "ranker",
             .version = "4",
             .state = VersionState::kLoading,
             .progress = 0.5,
             .labels = {"canary", "next"},
             .percent = 2.5,
             .shadow = true},
            {.model = "ranker", .version = "5", .reason = "a <damaged> file"}};
  }
  std::vector<LoadCount> load_counts() const override { return {{"ranker", 3, 2}}; }
  ModelControl control() const override { return ModelControl::kPoll; }
  void load(const std::string&, const LoadRequest&, Done) override {}
  void unload(const std::string&, std::optional<Version>, Done) override {}
};

}  // namespace tessera::test
