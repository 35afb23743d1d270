// The access log's lines, what names a call, and what a file that cannot be written costs.
#include "observe/access_log.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "common/flags.h"
#include "common/text.h"
#include "observe/request_ids.h"

namespace tessera {
namespace {

using Json = nlohmann::json;

CallRecord record(const std::string& request_id = "an id") {
  CallRecord told;
  told.protocol = "rest";
  told.peer = "10.0.0.7";
  told.request_id = request_id;
  told.trace_id = "0af7651916cd43dd8448eb211c80319c";
  told.method = "ModelInfer";
  told.model = "a \"b\"\n";
  told.version = "3";
  told.samples = 5;
  told.ids = 120;
  told.http_status = 200;
  told.took = std::chrono::nanoseconds(1'234'500);
  told.timings = StageTimings{.queue_us = 100, .forward_us = 1'000};
  return told;
}

// A folder that goes with its test.
struct TemporaryFolder {
  TemporaryFolder() {
    std::string name = testing::TempDir() + "access-XXXXXX";
    EXPECT_NE(::mkdtemp(name.data()), nullptr);
    path_ = name;
  }
  ~TemporaryFolder() { std::filesystem::remove_all(path_); }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

std::string content_of(const std::filesystem::path& path) {
  std::ifstream file(path);
  std::ostringstream all;
  all << file.rdbuf();
  return all.str();
}

// 2026-11-24T00:10:05.007999Z.
constexpr std::chrono::system_clock::time_point kNow{
    std::chrono::microseconds(1'795'479'005'007'999)};

TEST(AccessLineTest, HasEveryFieldInItsOrder) {
  // tests/server/test_access_log.py expects the same of the same call.
  EXPECT_EQ(
      access_line(record(), kNow),
      "{\"time\":\"2026-11-24T00:10:05.007Z\",\"protocol\":\"rest\",\"method\":\"ModelInfer\","
      "\"peer\":\"10.0.0.7\",\"model\":\"a \\\"b\\\"\\n\",\"version\":\"3\",\"samples\":5,"
      "\"ids\":120,\"code\":\"OK\",\"http_status\":200,\"duration_ms\":1.234,"
      "\"queue_ms\":0.100,\"forward_ms\":1.000,\"request_id\":\"an id\","
      "\"trace_id\":\"0af7651916cd43dd8448eb211c80319c\"}\n");
  CallRecord plain = record();
  plain.http_status = 0;
  plain.trace_id.clear();
  plain.timings.reset();
  const Json told = Json::parse(access_line(plain, kNow + std::chrono::seconds(1)));
  EXPECT_EQ(told.at("time"), "2026-11-24T00:10:06.007Z");
  for (const char* name : {"http_status", "queue_ms", "forward_ms", "trace_id"}) {
    EXPECT_FALSE(told.contains(name)) << name;
  }
}

TEST(RequestIdsTest, ATraceparentIsReadAsTheStandardHasIt) {
  std::ifstream file(TESSERA_TRACE_CASES);
  for (const Json& one : Json::parse(file)) {
    const auto header = one.at("header").get<std::string>();
    SCOPED_TRACE(header);
    const auto parent = read_traceparent(header);
    ASSERT_EQ(parent.has_value(), one.contains("trace"));
    if (!parent.has_value()) continue;
    EXPECT_EQ(parent->trace_id, one.at("trace").get<std::string>());
    EXPECT_EQ(parent->span_id, one.at("span").get<std::string>());
    EXPECT_EQ(parent->sampled, one.at("sampled").get<bool>());
  }
}

TEST(RequestIdsTest, AnIdIsTheClientsWhereItCanBeTold) {
  std::string id;
  choose_request_id("Any printable ~ id", id);
  EXPECT_EQ(id, "Any printable ~ id");
  choose_request_id(std::string(1'025, 'x'), id);
  EXPECT_EQ(id, std::string(1'024, 'x'));
  std::string last;
  for (const char* strange : {"", "a\nb", "\x7f", "\xc3\xa9"}) {
    choose_request_id(strange, id);
    EXPECT_EQ(id.size(), 32u);
    EXPECT_EQ(id.find_first_not_of("0123456789abcdef"), std::string::npos) << id;
    EXPECT_NE(id, last);
    last = id;
  }
}

TEST(AccessLogTest, AFileThatWasRenamedGetsNoLineOnceItWasReopened) {
  const TemporaryFolder folder;
  const std::filesystem::path path = folder.path() / "access";
  const std::filesystem::path old = folder.path() / "access.1";
  {
    AccessLog log(path.string());
    EXPECT_TRUE(log.has_file());
    log.write(record("first"));
    log.flush();
    std::filesystem::rename(path, old);
    log.reopen();
    log.write(record("second"));
    log.flush();
    EXPECT_EQ(Json::parse(content_of(path)).at("request_id"), "second");
    std::filesystem::remove(path);
    std::filesystem::create_directory(path);
    EXPECT_THROW(log.reopen(), UsageError);
    log.write(record("third"));
    log.flush();
    EXPECT_EQ(log.dropped_lines(), 0u);
  }
  EXPECT_EQ(Json::parse(content_of(old)).at("request_id"), "first");
  struct stat about {};
  ASSERT_EQ(::stat(old.c_str(), &about), 0);
  EXPECT_EQ(about.st_mode & 0137U, 0u);
}

TEST(AccessLogTest, LinesOfSeveralThreadsComeWhole) {
  constexpr int kThreads = 4;
  constexpr int kLines = 1'000;
  const TemporaryFolder folder;
  const std::filesystem::path path = folder.path() / "access";
  {
    AccessLog log(path.string());
    std::vector<std::jthread> threads;
    for (int t = 0; t < kThreads; ++t) {
      threads.emplace_back([&log, t] {
        for (int i = 0; i < kLines; ++i) log.write(record(text(t, " ", i)));
      });
    }
    threads.clear();
    log.flush();
    EXPECT_EQ(log.dropped_lines(), 0u);
  }
  std::ifstream file(path);
  std::vector<int> next(kThreads, 0);
  for (std::string line; std::getline(file, line);) {
    std::istringstream id(Json::parse(line).at("request_id").get<std::string>());
    std::size_t thread = 0;
    int number = 0;
    id >> thread >> number;
    EXPECT_EQ(number, next.at(thread)++);
  }
  EXPECT_EQ(next, std::vector<int>(kThreads, kLines));
}

TEST(AccessLogTest, LinesThatCannotBeWrittenAreCounted) {
  AccessLog log("/dev/full");
  for (int i = 0; i < 10; ++i) log.write(record());
  log.flush();
  EXPECT_EQ(log.dropped_lines(), 10u);
}

TEST(AccessLogTest, OneThatCannotBeOpenedIsRefused) {
  const TemporaryFolder folder;
  const std::string pipe = (folder.path() / "pipe").string();
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  for (const std::string& path :
       {(folder.path() / "no" / "file").string(), folder.path().string(), pipe}) {
    try {
      const AccessLog log(path);
      ADD_FAILURE() << path;
    } catch (const UsageError& error) {
      EXPECT_TRUE(std::string(error.what())
                      .starts_with(text("the access log '", path, "' cannot be opened (")))
          << error.what();
    }
  }
}

}  // namespace
}  // namespace tessera
