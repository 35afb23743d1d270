// tests/commits/cases.json: what both servers decide about a log of commits, case by case.
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "common/flags.h"
#include "follow/commit_chain.h"
#include "follow/fence.h"

namespace tessera {
namespace {

using Json = nlohmann::json;

const Json& cases(const std::string& table) {
  static const Json all = [] {
    std::ifstream file(TESSERA_COMMIT_CASES);
    return Json::parse(file);
  }();
  return all.at(table);
}

Fence fence_of(const Json& json) {
  Fence fence;
  if (json.is_array()) {
    for (const Json& number : json) fence[number.get<CommitNumber>()] = "";
  } else {
    for (const auto& item : json.items()) fence[std::stol(item.key())] = item.value();
  }
  return fence;
}

TEST(CommitCases, Names) {
  for (const auto& item : cases("names").at("valid").items()) {
    const auto number = item.value().get<CommitNumber>();
    EXPECT_EQ(parse_commit_name(item.key()), number);
    EXPECT_EQ(commit_name(number), item.key());
  }
  for (const Json& name : cases("names").at("invalid")) {
    EXPECT_EQ(parse_commit_name(name.get<std::string>()), std::nullopt) << name;
  }
}

TEST(CommitCases, Fences) {
  for (const Json& one : cases("fence").at("valid")) {
    EXPECT_EQ(parse_fence(one.at("text").get<std::string>(), "f"), fence_of(one.at("commits")));
  }
  for (const Json& one : cases("fence").at("invalid")) {
    EXPECT_THROW(parse_fence(one.get<std::string>(), "f"), UsageError) << one;
  }
}

TEST(CommitCases, Next) {
  const std::map<std::string, Step::Kind> kinds = {{"wait", Step::Kind::kWait},
                                                   {"take", Step::Kind::kTake},
                                                   {"back", Step::Kind::kBack},
                                                   {"gap", Step::Kind::kGap}};
  for (const Json& one : cases("next")) {
    std::set<CommitNumber> numbers;
    for (const Json& name : one.at("names")) {
      const auto number = parse_commit_name(name.get<std::string>());
      if (number.has_value()) numbers.insert(*number);
    }
    const Step step = next_step(numbers, fence_of(one.at("fence")),
                                one.at("applied").get<std::vector<CommitNumber>>());
    EXPECT_EQ(step, (Step{kinds.at(one.at("step")), one.at("number").get<CommitNumber>()})) << one;
  }
}

TEST(CommitCases, Refusal) {
  for (const Json& one : cases("refusal")) {
    const Json& given = one.at("commit");
    const Json& stands = one.at("state");
    CommitInfo commit;
    commit.model = given.at("model");
    commit.version = given.at("version");
    commit.base = given.at("base");
    commit.number = given.at("number");
    commit.previous = given.at("previous");
    const LogState state{.model = stands.at("model"),
                         .version = stands.at("version"),
                         .base = stands.at("base"),
                         .number = stands.at("number"),
                         .sha256 = stands.at("sha256")};
    const auto found = refusal(commit, given.at("sha256"), one.at("named").get<CommitNumber>(),
                               state, fence_of(one.at("fence")));
    EXPECT_EQ(found.has_value() ? Json(found->reason) : Json(), one.at("refusal")) << one;
  }
}

}  // namespace
}  // namespace tessera
