// tests/repository/cases.json: what both servers decide about a repository, case by case.
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "repository/control_record.h"
#include "repository/routes.h"
#include "repository/serving_config.h"
#include "repository/wanted.h"

namespace tessera {
namespace {

using Json = nlohmann::json;
using Seconds = std::chrono::duration<double>;

const Json& cases(const std::string& table) {
  static const Json all = [] {
    std::ifstream file(TESSERA_REPOSITORY_CASES);
    return Json::parse(file);
  }();
  return all.at(table);
}

std::set<Version> versions_of(const Json& list) { return list.get<std::set<Version>>(); }

Wanted wanted_of(const Json& one, const std::set<Version>& present) {
  return wanted_versions(present, parse_serving_config(one.at("serving").get<std::string>(), "f"),
                         parse_control_record(one.at("control").dump(), "f"));
}

TEST(RepositoryCases, Draw) {
  for (const Json& one : cases("draw")) {
    const auto model = one.at("model").get<std::string>();
    const auto key = one.at("key").get<std::string>();
    EXPECT_EQ(draw(model, key), one.at("answer").get<double>()) << one;
    EXPECT_EQ(draw(model, key, kShadowSuffix), one.at("shadow").get<double>()) << one;
  }
}

TEST(RepositoryCases, BackOff) {
  for (const Json& one : cases("back_off_s")) {
    EXPECT_EQ(load_backoff(one.at(0).get<int>()), std::chrono::seconds(one.at(1).get<int>()));
  }
}

TEST(RepositoryCases, Names) {
  const auto check = [](const std::string& table, const auto& accepts) {
    for (const bool valid : {true, false}) {
      for (const Json& name : cases(table).at(valid ? "valid" : "invalid")) {
        EXPECT_EQ(accepts(name.get<std::string>()), valid) << table << ' ' << name;
      }
    }
  };
  check("versions", [](const std::string& name) { return parse_version(name).has_value(); });
  check("labels", is_label);
  check("model_names", is_model_name);
}

TEST(RepositoryCases, Wanted) {
  for (const Json& one : cases("wanted")) {
    const Wanted wanted = wanted_of(one, versions_of(one.at("present")));
    EXPECT_EQ(wanted.versions, versions_of(one.at("wanted"))) << one;
    EXPECT_EQ(wanted.labels, one.at("labels").get<Labels>()) << one;
    EXPECT_EQ(wanted.may_be_none, one.value("may_be_none", false)) << one;
  }
}

TEST(RepositoryCases, Choice) {
  for (const Json& one : cases("choice")) {
    NotReady not_ready;
    for (const auto& [version, why] : one.at("not_ready").items()) {
      not_ready[*parse_version(version)] = why.get<std::string>();
    }
    const std::set<Version> ready = versions_of(one.at("ready"));
    const Routes routes("ranker", ready, not_ready, wanted_of(one, ready));
    const auto asked = one.at("asked").get<std::string>();
    const Routes::Choice choice = routes.choose(asked, one.at("key").get<std::string>());
    if (one.contains("answer")) {
      EXPECT_EQ(choice.version, one.at("answer").get<Version>()) << one;
    } else {
      EXPECT_EQ(choice.version, std::nullopt) << one;
      EXPECT_EQ(code_name(choice.status.code), one.at("refusal").get<std::string>()) << one;
      EXPECT_EQ(choice.status.message, one.at("message").get<std::string>()) << one;
    }
  }
}

TEST(RepositoryCases, Shadow) {
  for (const Json& one : cases("shadow")) {
    Wanted wanted;
    wanted.shadow = {.version = 4, .percent = one.at("percent").get<double>()};
    const std::set<Version> ready =
        one.at("ready").get<bool>() ? std::set<Version>{3, 4} : std::set<Version>{3};
    const auto shadow =
        Routes("ranker", ready, {}, wanted).shadow(one.at("key").get<std::string>());
    const Json& expected = one.at("shadow");
    EXPECT_EQ(shadow, expected.is_null() ? std::nullopt : std::optional(expected.get<Version>()))
        << one;
  }
}

Fingerprint file(const Json& number) {
  return {.device = 1, .inode = number.get<std::uint64_t>(), .bytes = 8};
}

TimePoint at(const Json& clock) {
  return TimePoint(std::chrono::duration_cast<Duration>(Seconds(clock.get<double>())));
}

VersionStatus status_of(const Json& state) {
  VersionStatus status;
  if (state.contains("file")) {
    status.state = VersionState::kReady;
    status.loaded = file(state.at("file"));
  }
  if (state.contains("failed_file")) {
    status.failed = file(state.at("failed_file"));
    status.failures = state.at("failures").get<int>();
    status.failed_at = at(state.at("failed_at"));
  }
  status.dropped = state.value("dropped", false);
  return status;
}

TEST(RepositoryCases, Plan) {
  for (const Json& one : cases("plan")) {
    Wanted wanted;
    wanted.versions = versions_of(one.at("wanted"));
    wanted.labels = one.at("labels").get<Labels>();
    wanted.may_be_none = one.at("may_be_none").get<bool>();
    std::map<Version, Fingerprint> present;
    for (const auto& [version, number] : one.at("present").items()) {
      present[*parse_version(version)] = file(number);
    }
    VersionStates states;
    for (const auto& [version, state] : one.at("states").items()) {
      states[*parse_version(version)] = status_of(state);
    }
    const Plan plan =
        plan_model(wanted, present, states, one.at("retry").get<bool>(), at(one.at("now")));
    const Json& load = one.at("load");
    EXPECT_EQ(plan.load, load.is_null() ? std::nullopt : std::optional(load.get<Version>())) << one;
    EXPECT_EQ(plan.retire, versions_of(one.at("retire"))) << one;
    EXPECT_EQ(plan.again, one.at("again").is_null() ? kNever : at(one.at("again"))) << one;
  }
}

}  // namespace
}  // namespace tessera
