// tests/server/token_cases.json: the file of tokens and what its limits allow, case by case; and
// what the Authorizer makes of both.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "common/flags.h"
#include "common/text.h"
#include "security/authorizer.h"
#include "security/file_watch.h"
#include "security/token_table.h"
#include "support.h"

namespace tessera {
namespace {

using Json = nlohmann::json;

Json cases(const char* kind) {
  std::ifstream file(TESSERA_TOKEN_CASES);
  return Json::parse(file).at(kind);
}

TEST(TokenCases, FilesAreThoseOfBothServers) {
  for (const Json& one : cases("files")) {
    SCOPED_TRACE(one.at("case").get<std::string>());
    const auto content = one.at("content").get<std::string>();
    if (one.contains("error")) {
      try {
        TokenTable::parse(content);
        ADD_FAILURE() << "was taken";
      } catch (const UsageError& error) {
        EXPECT_EQ(error.what(), one.at("error").get<std::string>());
      }
      continue;
    }
    const auto table = TokenTable::parse(content);
    EXPECT_EQ(table->size(), one.at("tokens").size());
    for (const Json& token : one.at("tokens")) {
      const TokenTable::Token* const found = table->find(token.at(0).get<std::string>());
      ASSERT_NE(found, nullptr);
      EXPECT_EQ(found->name(), token.at(1).get<std::string>());
      EXPECT_EQ(found->calls_per_s(), token.at(2).get<double>());
    }
    EXPECT_EQ(table->find("other"), nullptr);
  }
}

TEST(TokenCases, RatesAreThoseOfBothServers) {
  for (const Json& one : cases("rates")) {
    SCOPED_TRACE(one.at("case").get<std::string>());
    const auto rate = one.at("rate").get<double>();
    const auto table = TokenTable::parse(text("abc shop ", rate));
    std::int64_t full_until = 0;
    std::vector<int> allowed;
    for (const Json& at : one.at("calls_ms")) {
      const std::int64_t now = (100 + at.get<std::int64_t>()) * 1'000'000;
      const std::int64_t after = next_full_until(full_until, now, rate);
      if (after >= 0) full_until = after;
      allowed.push_back(after >= 0 ? 1 : 0);
      EXPECT_EQ(table->find("abc")->take(TimePoint(Duration(now))), after >= 0);
    }
    EXPECT_EQ(allowed, one.at("allowed").get<std::vector<int>>());
  }
}

class Files : public testing::Test {
 protected:
  void SetUp() override { std::filesystem::create_directory(folder_); }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::string write(const std::string& name, const std::string& content) const {
    const std::string path = folder_ + "/" + name;
    std::ofstream(path, std::ios::trunc) << content;
    return path;
  }

  const std::string folder_ =
      (std::filesystem::temp_directory_path() / text("tessera-tokens-", ::getpid())).string();
};

TEST_F(Files, AHeaderNeedsATokenThatIsThere) {
  SecurityMetrics metrics;
  const test::FakeClock clock;
  Authorizer authorizer(write("tokens", "abc shop\n"), metrics, clock);
  for (const char* header : {"", "abc", "Bearer", "Bearer ", "Basic abc", "Bearerabc"}) {
    EXPECT_EQ(authorizer.admit(header).code, Code::kUnauthenticated) << header;
  }
  for (const char* header : {"Bearer abc", "bearer abc", "BEARER  abc "}) {
    EXPECT_TRUE(authorizer.admit(header).ok()) << header;
  }
  const Status unknown = authorizer.admit("Bearer abd");
  EXPECT_EQ(unknown.code, Code::kUnauthenticated);
  EXPECT_EQ(unknown.message.find("abd"), std::string::npos);
  EXPECT_EQ(metrics.refused[0], 6U);
  EXPECT_EQ(metrics.refused[1], 1U);
}

TEST_F(Files, ReadAgainTokensGoOnCounting) {
  SecurityMetrics metrics;
  const test::FakeClock clock;
  Authorizer authorizer(write("tokens", "abc shop 1\n"), metrics, clock);
  EXPECT_TRUE(authorizer.admit("Bearer abc").ok());
  write("tokens", "abd\nabc shop 1\n");
  EXPECT_EQ(authorizer.read_again(), 2U);
  EXPECT_TRUE(authorizer.admit("Bearer abd").ok());
  const Status over = authorizer.admit("Bearer abc");
  EXPECT_EQ(over.code, Code::kResourceExhausted);
  EXPECT_EQ(over.message,
            "the token 'shop' allows 1 calls a second, and there were more; try again later");
  write("tokens", "a,b\n");
  EXPECT_THROW(authorizer.read_again(), UsageError);
  EXPECT_TRUE(authorizer.admit("Bearer abd").ok());
}

TEST_F(Files, AChangeIsToldOnceTheFilesHaveSettled) {
  const std::string first = write("a", "1");
  const std::string second = folder_ + "/b";
  FileWatch watch({first, second});
  EXPECT_FALSE(watch.changed());
  write("b", "2");
  EXPECT_FALSE(watch.changed());
  write("a", "three");
  EXPECT_FALSE(watch.changed());
  EXPECT_TRUE(watch.changed());
  EXPECT_FALSE(watch.changed());
  std::filesystem::remove(second);
  watch.forget();
  EXPECT_FALSE(watch.changed());
}

}  // namespace
}  // namespace tessera
