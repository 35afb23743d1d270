// What a call changes, and what tests/repository/cases.json, which is for both servers, leaves open
// of what is done next and of which version answers.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "repository/changes.h"
#include "repository/routes.h"
#include "repository/wanted.h"

namespace tessera {
namespace {

using std::chrono::seconds;

VersionChoice latest(std::int64_t count) {
  return {.kind = VersionChoice::Kind::kLatest, .latest = count, .list = {}};
}

ServingConfig serving(VersionChoice choice, Labels labels = {},
                      std::optional<ShadowConfig> shadow = {}) {
  ServingConfig config;
  config.versions = std::move(choice);
  config.labels = std::move(labels);
  config.shadow = shadow;
  return config;
}

std::string case_name(const auto& info) { return info.param.name; }

constexpr TimePoint kNow{seconds(1'000)};

Fingerprint file(std::uint64_t inode) { return {.device = 1, .inode = inode, .bytes = 8}; }

VersionStatus ready(std::uint64_t inode) {
  return {.state = VersionState::kReady, .loaded = file(inode)};
}
VersionStatus failed(std::uint64_t inode, int failures, TimePoint at) {
  return {.failed = file(inode), .failures = failures, .failed_at = at};
}
VersionStatus in_state(VersionState state) { return {.state = state}; }

VersionStatus with_failed_reload(VersionStatus status, std::uint64_t inode) {
  status.failed = file(inode);
  status.failures = 1;
  status.failed_at = kNow;
  return status;
}

VersionStatus dropped(VersionStatus status) {
  status.dropped = true;
  return status;
}

struct PlanCase {
  std::string name;
  Wanted wanted;
  std::map<Version, Fingerprint> present;
  VersionStates states;
  bool retry;
  Plan plan;
};

class PlanModel : public testing::TestWithParam<PlanCase> {};

TEST_P(PlanModel, Decides) {
  const PlanCase& given = GetParam();
  const Plan plan = plan_model(given.wanted, given.present, given.states, given.retry, kNow);
  EXPECT_EQ(plan.load, given.plan.load);
  EXPECT_EQ(plan.retire, given.plan.retire);
  EXPECT_EQ(plan.again, given.plan.again);
}

Wanted want(std::set<Version> versions, Labels labels = {}) {
  return {.versions = std::move(versions), .labels = std::move(labels)};
}

const std::map<Version, Fingerprint> kThree = {{1, file(1)}, {2, file(2)}, {3, file(3)}};

const PlanCase kPlanCases[] = {
    {"what_is_loading_is_left",
     want({3}),
     kThree,
     {{3, in_state(VersionState::kLoading)}},
     true,
     {}},
    {"what_is_unloading_is_waited_for",
     want({3}),
     kThree,
     {{3, in_state(VersionState::kUnloading)}},
     true,
     {}},
    {"one_that_waits_holds_up_no_other",
     want({2, 3}),
     kThree,
     {{3, failed(3, 1, kNow)}},
     true,
     {.load = 2, .again = kNow + seconds(1)}},
    {"a_reload_that_failed_waits",
     want({3}),
     kThree,
     {{3, with_failed_reload(ready(7), 3)}},
     true,
     {.again = kNow + seconds(1)}},
    {"the_old_stays_while_the_new_loads",
     want({3}),
     kThree,
     {{2, ready(2)}, {3, in_state(VersionState::kLoading)}},
     false,
     {}},
    {"a_failed_reload_keeps_nothing_back",
     want({3}),
     kThree,
     {{2, ready(2)}, {3, with_failed_reload(ready(7), 3)}},
     false,
     {.retire = {2}}},
    {"what_is_asked_for_again_is_not_dropped",
     want({2}),
     kThree,
     {{2, dropped(ready(2))}},
     false,
     {}},
};

INSTANTIATE_TEST_SUITE_P(Repository, PlanModel, testing::ValuesIn(kPlanCases),
                         case_name<testing::TestParamInfo<PlanCase>>);

// 1 to 4 are there, and `answering` is ready.
ModelSituation situation(ServingConfig config, ControlRecord record, std::set<Version> answering) {
  ModelSituation made{.model = "m",
                      .present = {1, 2, 3, 4},
                      .config = std::move(config),
                      .record = std::move(record),
                      .states = {}};
  for (const Version version : answering) made.states[version] = {.state = VersionState::kReady};
  return made;
}

TEST(ChangeByLoad, OfTheModelTakesBackItsUnload) {
  const Change change = change_by_load(
      situation(serving(latest(1), {{"stable", 2}}), {.unloaded = true, .remove = {4}}, {}), {});
  ASSERT_TRUE(change.status.ok());
  EXPECT_EQ(change.record, (ControlRecord{.remove = {4}}));
  EXPECT_EQ(change.load, (std::set<Version>{2, 3}));
  EXPECT_EQ(change.drop, std::nullopt);
}

TEST(ChangeByLoad, OfAVersionAddsIt) {
  const Change change =
      change_by_load(situation({}, {.unloaded = true, .remove = {1, 2}}, {4}), {.version = 2});
  ASSERT_TRUE(change.status.ok());
  EXPECT_EQ(change.record, (ControlRecord{.add = {2}, .remove = {1}}));
  EXPECT_EQ(change.load, (std::set<Version>{2}));
}

TEST(ChangeByLoad, MovesALabel) {
  const Change change = change_by_load(situation({}, {.labels = {{"stable", 4}}}, {4}),
                                       {.version = 3, .label = "stable"});
  ASSERT_TRUE(change.status.ok());
  EXPECT_EQ(change.record, (ControlRecord{.add = {3}, .labels = {{"stable", 3}}}));
}

TEST(ChangeByLoad, RollsBackToThePreviousVersion) {
  const Change change =
      change_by_load(situation({}, {.add = {4}, .remove = {3}}, {1, 4}), {.rollback = Rollback{}});
  ASSERT_TRUE(change.status.ok()) << change.status.message;
  EXPECT_EQ(change.record, (ControlRecord{.remove = {3, 4}, .labels = {{"stable", 2}}}));
  EXPECT_EQ(change.load, (std::set<Version>{2}));
  EXPECT_EQ(change.drop, 4);
}

TEST(ChangeByLoad, RollsBackFromTheStableVersionNotFromTheHighest) {
  const Change change = change_by_load(situation(serving(latest(1), {{"stable", 3}}), {}, {3, 4}),
                                       {.rollback = Rollback{}});
  ASSERT_TRUE(change.status.ok()) << change.status.message;
  EXPECT_EQ(change.record, (ControlRecord{.remove = {3}, .labels = {{"stable", 2}}}));
  EXPECT_EQ(change.drop, 3);
}

TEST(ChangeByLoad, RollsBackToAVersion) {
  const Change change =
      change_by_load(situation({}, {.remove = {1}}, {4}), {.rollback = Rollback{.version = 1}});
  ASSERT_TRUE(change.status.ok()) << change.status.message;
  EXPECT_EQ(change.record, (ControlRecord{.remove = {4}, .labels = {{"stable", 1}}}));
  // Where nothing answers there is nothing to unload.
  const Change dark = change_by_load(situation({}, {}, {}), {.rollback = Rollback{.version = 1}});
  ASSERT_TRUE(dark.status.ok());
  EXPECT_EQ(dark.drop, std::nullopt);
}

TEST(ChangeByLoad, SaysWhatIsNotPossible) {
  struct Case {
    ModelSituation given;
    LoadRequest request;
    Code code;
    std::string message;
  };
  const Rollback previous;
  const Case cases[] = {
      {situation({}, {}, {4}),
       {.version = 9},
       Code::kNotFound,
       "version '9' of model 'm' is not in its folder, which has '1', '2', '3', '4'"},
      {situation({}, {}, {4}),
       {.label = "a"},
       Code::kInvalidArgument,
       "label needs to know whose it is; give version, too"},
      {situation({}, {}, {4}),
       {.version = 3, .rollback = previous},
       Code::kInvalidArgument,
       "rollback goes with neither version nor label; give rollback alone"},
      {situation({}, {}, {1}),
       {.rollback = previous},
       Code::kFailedPrecondition,
       "model 'm' has no version below 1, which answers, to go back to; name the version that you "
       "want"},
      {situation({}, {}, {}),
       {.rollback = previous},
       Code::kFailedPrecondition,
       "model 'm' has no version that answers, and so none before it to go back to; name the "
       "version that you want"},
      {situation({}, {}, {4}),
       {.rollback = Rollback{.version = 4}},
       Code::kFailedPrecondition,
       "version '4' of model 'm' answers already"},
      {situation({}, {}, {4}),
       {.rollback = Rollback{.version = 9}},
       Code::kNotFound,
       "version '9' of model 'm' is not in its folder, which has '1', '2', '3', '4'"},
      {situation(serving(latest(1), {{"canary", 4}}), {}, {4}),
       {.rollback = previous},
       Code::kFailedPrecondition,
       "version '4' of model 'm' cannot be rolled back: the label 'canary' names it; move that "
       "first"},
  };
  for (const Case& one : cases) {
    const Status status = change_by_load(one.given, one.request).status;
    EXPECT_EQ(status.code, one.code) << status.message;
    EXPECT_EQ(status.message, one.message);
  }
}

TEST(ChangeByUnload, OfTheModelAndOfAVersion) {
  const Change model = change_by_unload(situation({}, {.add = {3}}, {3, 4}), std::nullopt);
  ASSERT_TRUE(model.status.ok());
  EXPECT_EQ(model.record, (ControlRecord{.unloaded = true, .add = {3}}));
  EXPECT_EQ(model.drop, std::nullopt);
  const Change version = change_by_unload(situation({}, {.add = {3}}, {3, 4}), 3);
  ASSERT_TRUE(version.status.ok());
  EXPECT_EQ(version.record, (ControlRecord{.remove = {3}}));
  EXPECT_EQ(version.drop, 3);
}

TEST(ChangeByUnload, AVersionThatIsNamedStays) {
  const auto refused = [](const ServingConfig& config, const ControlRecord& record) {
    const Status status = change_by_unload(situation(config, record, {3, 4}), 3).status;
    EXPECT_EQ(status.code, Code::kFailedPrecondition);
    return status.message;
  };
  EXPECT_EQ(refused(serving(latest(1), {{"stable", 3}}), {}),
            "version '3' of model 'm' cannot be unloaded: the label 'stable' names it; move that "
            "first");
  EXPECT_EQ(refused({}, {.labels = {{"a", 3}}}),
            "version '3' of model 'm' cannot be unloaded: the label 'a' names it; move that first");
  EXPECT_EQ(refused(serving(latest(1), {}, ShadowConfig{.version = 3, .percent = 10}), {}),
            "version '3' of model 'm' cannot be unloaded: serving.yaml's shadow names it; move "
            "that first");
  EXPECT_EQ(change_by_unload(situation({}, {}, {4}), 9).status.code, Code::kNotFound);
}

Wanted labelled(Labels labels, Shares traffic = {}, std::optional<ShadowConfig> shadow = {}) {
  return {.labels = std::move(labels), .traffic = std::move(traffic), .shadow = shadow};
}

TEST(Routes, SharesAreMetAndKeysStay) {
  const Wanted wanted = labelled({{"a", 1}, {"b", 2}, {"c", 3}}, {{"a", 70}, {"b", 0}, {"c", 30}},
                                 ShadowConfig{.version = 3, .percent = 20});
  const Routes routes("m", {1, 2, 3}, {}, wanted);
  constexpr int kKeys = 20'000;
  std::map<Version, int> drawn;
  int shadowed = 0;
  int both = 0;
  for (int i = 0; i < kKeys; ++i) {
    const std::string key = "user-" + std::to_string(i);
    const Version version = *routes.choose("", key).version;
    ASSERT_EQ(version, draw("m", key) < 0.7 ? 1 : 3);
    ++drawn[version];
    const bool by_shadow = routes.shadow(key).has_value();
    shadowed += by_shadow ? 1 : 0;
    both += by_shadow && version == 3 ? 1 : 0;
  }
  // Five standard deviations of a binomial count.
  const auto near = [](int count, double share) {
    return std::abs(count - kKeys * share) < 5 * std::sqrt(kKeys * share * (1 - share));
  };
  EXPECT_EQ(drawn.size(), 2U);
  EXPECT_TRUE(near(drawn[1], 0.7)) << drawn[1];
  EXPECT_TRUE(near(shadowed, 0.2)) << shadowed;
  EXPECT_TRUE(near(both, 0.06)) << both;  // drawn independently
}

}  // namespace
}  // namespace tessera
