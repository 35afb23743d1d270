// Which versions are wanted, what is done next, what a call changes, and which version answers.
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
const VersionChoice kAll{.kind = VersionChoice::Kind::kAll, .latest = 1, .list = {}};
VersionChoice listed(std::vector<Version> list) {
  return {.kind = VersionChoice::Kind::kList, .latest = 1, .list = std::move(list)};
}

ServingConfig serving(VersionChoice choice, Labels labels = {},
                      std::optional<ShadowConfig> shadow = {}) {
  ServingConfig config;
  config.versions = std::move(choice);
  config.labels = std::move(labels);
  config.shadow = shadow;
  return config;
}

struct WantedCase {
  std::string name;
  ServingConfig config;
  ControlRecord record;
  std::set<Version> wanted;  // of 1, 3, 7 and 10
};

class WantedVersions : public testing::TestWithParam<WantedCase> {};

TEST_P(WantedVersions, FollowFromFolderSettingsAndRecord) {
  const WantedCase& given = GetParam();
  EXPECT_EQ(wanted_versions({1, 3, 7, 10}, given.config, given.record).versions, given.wanted);
}

const WantedCase kWantedCases[] = {
    {"default_is_the_latest", {}, {}, {10}},
    {"the_latest_two_by_number", serving(latest(2)), {}, {7, 10}},
    {"more_than_there_are", serving(latest(9)), {}, {1, 3, 7, 10}},
    {"all", serving(kAll), {}, {1, 3, 7, 10}},
    {"of_a_list_those_that_are_there", serving(listed({3, 8})), {}, {3}},
    {"labels_beside_the_chosen", serving(latest(1), {{"stable", 3}}), {}, {3, 10}},
    {"a_label_of_a_missing_version", serving(latest(1), {{"stable", 5}}), {}, {5, 10}},
    {"the_shadow", serving(latest(1), {}, ShadowConfig{.version = 1, .percent = 10}), {}, {1, 10}},
    {"removed_ones_are_not_chosen", serving(latest(2)), {.remove = {10}}, {3, 7}},
    {"added_ones", serving(latest(1)), {.add = {3}}, {3, 10}},
    {"a_label_wins_over_a_removal", serving(latest(1), {{"a", 10}}), {.remove = {10}}, {7, 10}},
    {"the_records_labels_win",
     serving(latest(1), {{"stable", 3}, {"canary", 7}}),
     {.labels = {{"stable", 1}}},
     {1, 7, 10}},
    {"unloaded", serving(kAll, {{"stable", 3}}), {.unloaded = true, .add = {7}}, {}},
};

std::string case_name(const auto& info) { return info.param.name; }

INSTANTIATE_TEST_SUITE_P(Repository, WantedVersions, testing::ValuesIn(kWantedCases),
                         case_name<testing::TestParamInfo<WantedCase>>);

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

Wanted none(bool may_be_none) { return {.may_be_none = may_be_none}; }

const std::map<Version, Fingerprint> kThree = {{1, file(1)}, {2, file(2)}, {3, file(3)}};

const PlanCase kPlanCases[] = {
    {"the_highest_first", want({1, 2, 3}), kThree, {}, false, {.load = 3}},
    {"stable_before_the_highest", want({1, 2, 3}, {{"stable", 2}}), kThree, {}, false, {.load = 2}},
    {"what_is_ready_is_left", want({1, 2}), kThree, {{2, ready(2)}}, false, {.load = 1}},
    {"nothing_to_do", want({2}), kThree, {{2, ready(2)}}, true, {}},
    {"what_is_not_there_is_passed_over", want({2, 9}), kThree, {}, false, {.load = 2}},
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
    {"a_replaced_file_is_loaded_again", want({3}), kThree, {{3, ready(7)}}, false, {.load = 3}},
    {"a_vanished_file_stays_loaded", want({3}), {}, {{3, ready(3)}}, true, {}},
    {"failed_without_retries", want({3}), kThree, {{3, failed(3, 1, kNow)}}, false, {}},
    {"failed_and_replaced", want({3}), kThree, {{3, failed(7, 9, kNow)}}, false, {.load = 3}},
    {"failed_waits",
     want({3}),
     kThree,
     {{3, failed(3, 3, kNow - seconds(1))}},
     true,
     {.again = kNow + seconds(3)}},
    {"failed_is_tried_again",
     want({3}),
     kThree,
     {{3, failed(3, 3, kNow - seconds(4))}},
     true,
     {.load = 3}},
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
    {"the_old_retires_when_the_new_is_ready",
     want({3}),
     kThree,
     {{2, ready(2)}, {3, ready(3)}},
     false,
     {.retire = {2}}},
    {"the_old_stays_while_the_new_loads",
     want({3}),
     kThree,
     {{2, ready(2)}, {3, in_state(VersionState::kLoading)}},
     false,
     {}},
    {"the_old_stays_when_the_new_fails",
     want({3}),
     kThree,
     {{2, ready(2)}, {3, failed(3, 1, kNow)}},
     false,
     {}},
    {"the_old_stays_when_the_new_is_missing", want({9}), kThree, {{2, ready(2)}}, false, {}},
    {"a_reload_keeps_nothing_back",
     want({3}),
     kThree,
     {{2, ready(2)}, {3, with_failed_reload(ready(7), 3)}},
     false,
     {.retire = {2}}},
    {"a_dropped_one_retires_at_once",
     want({3}),
     kThree,
     {{1, ready(1)}, {2, dropped(ready(2))}, {3, failed(3, 1, kNow)}},
     false,
     {.retire = {2}}},
    {"what_is_asked_for_again_is_not_dropped",
     want({2}),
     kThree,
     {{2, dropped(ready(2))}},
     false,
     {}},
    {"an_unloaded_model_retires", none(true), kThree, {{2, ready(2)}}, false, {.retire = {2}}},
    {"a_folder_without_versions_changes_nothing", none(false), {}, {{2, ready(2)}}, false, {}},
};

INSTANTIATE_TEST_SUITE_P(Repository, PlanModel, testing::ValuesIn(kPlanCases),
                         case_name<testing::TestParamInfo<PlanCase>>);

TEST(Backoff, DoublesUpToAMinute) {
  std::vector<Duration> waits;
  for (const int failures : {1, 2, 3, 6, 7, 8, 1'000'000}) waits.push_back(load_backoff(failures));
  EXPECT_EQ(waits, (std::vector<Duration>{seconds(1), seconds(2), seconds(4), seconds(32),
                                          seconds(60), seconds(60), seconds(60)}));
}

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

TEST(Draw, IsTheSameOnEveryServer) {
  // XXH64 of "m\0k" and of "m\0k\0shadow" by the reference implementation, divided by 2^64.
  EXPECT_DOUBLE_EQ(draw("m", "k"), 0.15092247941502437);
  EXPECT_DOUBLE_EQ(draw("m", "k", kShadowSuffix), 0.6987873063185174);
  EXPECT_NE(draw("m", "k"), draw("mk", ""));
}

Wanted labelled(Labels labels, Shares traffic = {}, std::optional<ShadowConfig> shadow = {}) {
  return {.labels = std::move(labels), .traffic = std::move(traffic), .shadow = shadow};
}

struct RouteCase {
  std::string name;
  std::set<Version> ready;
  Wanted wanted;
  std::string asked;
  std::optional<Version> version;
  Code code = Code::kOk;
  std::string message = "";
};

class RoutesTest : public testing::TestWithParam<RouteCase> {};

TEST_P(RoutesTest, Choose) {
  const RouteCase& given = GetParam();
  const Routes routes("m", given.ready, {{8, "is still loading"}, {9, "could not be loaded: bad"}},
                      given.wanted);
  const Routes::Choice choice = routes.choose(given.asked, "key");
  EXPECT_EQ(choice.version, given.version);
  EXPECT_EQ(choice.status.code, given.code);
  EXPECT_EQ(choice.status.message, given.message);
}

const RouteCase kRouteCases[] = {
    {"a_number", {3, 4}, {}, "3", 3},
    {"a_label", {3, 4}, labelled({{"canary", 3}}), "canary", 3},
    {"the_highest", {3, 4}, labelled({{"canary", 3}}), "", 4},
    {"the_stable", {3, 4}, labelled({{"stable", 3}}), "", 3},
    {"the_highest_while_stable_is_not_ready", {3, 4}, labelled({{"stable", 8}}), "", 4},
    {"the_shadow_answers_nobody",
     {3, 4},
     labelled({}, {}, ShadowConfig{.version = 4, .percent = 1}),
     "",
     3},
    {"a_labelled_shadow_may",
     {3, 4},
     labelled({{"a", 4}}, {}, ShadowConfig{.version = 4, .percent = 1}),
     "",
     4},
    {"all_to_one_label", {3, 4}, labelled({{"a", 3}, {"b", 4}}, {{"a", 100}, {"b", 0}}), "", 3},
    {"none_to_the_first", {3, 4}, labelled({{"a", 3}, {"b", 4}}, {{"a", 0}, {"b", 100}}), "", 4},
    {"a_drawn_version_that_is_not_ready", {3, 4}, labelled({{"a", 8}}, {{"a", 100}}), "", 4},
    {"a_drawn_label_without_version", {3, 4}, labelled({}, {{"a", 100}}), "", 4},
    {"a_version_wins_over_shares", {3, 4}, labelled({{"a", 3}}, {{"a", 100}}), "4", 4},
    {"unknown_version",
     {3, 4},
     labelled({{"b", 4}, {"a", 3}}),
     "7",
     {},
     Code::kNotFound,
     "model_version '7' of model 'm' is unknown; there is version '3', '4' and label 'a', 'b'"},
    {"unknown_label",
     {3},
     {},
     "canary",
     {},
     Code::kNotFound,
     "model_version 'canary' of model 'm' is unknown; there is version '3'"},
    {"leading_zeros",
     {3},
     {},
     "03",
     {},
     Code::kNotFound,
     "model_version '03' of model 'm' is unknown; there is version '3'"},
    {"nothing_is_there",
     {},
     {},
     "3",
     {},
     Code::kNotFound,
     "model_version '3' of model 'm' is unknown; there is no version"},
    {"loading", {3}, {}, "8", {}, Code::kUnavailable, "version '8' of model 'm' is still loading"},
    {"a_label_of_a_failed_one",
     {3},
     labelled({{"a", 9}}),
     "a",
     {},
     Code::kUnavailable,
     "version '9' of model 'm' could not be loaded: bad"},
    {"nothing_is_ready",
     {},
     {},
     "",
     {},
     Code::kUnavailable,
     "version '9' of model 'm' could not be loaded: bad"},
};

INSTANTIATE_TEST_SUITE_P(Repository, RoutesTest, testing::ValuesIn(kRouteCases),
                         case_name<testing::TestParamInfo<RouteCase>>);

TEST(Routes, AModelWithoutVersionsIsUnavailable) {
  const Routes routes("m", {}, {}, {});
  EXPECT_EQ(routes.choose("", "").status.code, Code::kUnavailable);
  EXPECT_EQ(routes.choose("", "").status.message, "no version of model 'm' is loaded");
  EXPECT_EQ(routes.usual(), std::nullopt);
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

TEST(Routes, AShadowThatIsNotReadyComputesNothing) {
  const Wanted wanted = labelled({}, {}, ShadowConfig{.version = 9, .percent = 100});
  EXPECT_EQ(Routes("m", {3}, {}, wanted).shadow("k"), std::nullopt);
  EXPECT_EQ(Routes("m", {3, 9}, {}, wanted).shadow("k"), 9);
}

}  // namespace
}  // namespace tessera
