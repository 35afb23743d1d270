// The log: what it writes, and what happens when nobody reads it.
#include "server/log.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <string>
#include <thread>
#include <vector>

#include "common/text.h"
#include "server/log_writer.h"

namespace tessera {
namespace {

class Pipe {
 public:
  Pipe() { EXPECT_EQ(::pipe2(ends_.data(), O_CLOEXEC), 0); }
  ~Pipe() {
    close_reader();
    ::close(ends_[1]);
  }
  Pipe(const Pipe&) = delete;
  Pipe& operator=(const Pipe&) = delete;

  int writer() const { return ends_[1]; }

  void close_reader() {
    if (ends_[0] >= 0) ::close(ends_[0]);
    ends_[0] = -1;
  }

  // What is in it; waits for the first bytes if `wait`.
  std::string read(bool wait = false) {
    ::fcntl(ends_[0], F_SETFL, wait ? 0 : O_NONBLOCK);
    std::string all;
    std::array<char, 65'536> bytes{};
    for (ssize_t count = 0; (count = ::read(ends_[0], bytes.data(), bytes.size())) > 0;) {
      all.append(bytes.data(), static_cast<std::size_t>(count));
      ::fcntl(ends_[0], F_SETFL, O_NONBLOCK);
    }
    return all;
  }

 private:
  std::array<int, 2> ends_{-1, -1};
};

std::size_t lines_of(const std::string& text) {
  return static_cast<std::size_t>(std::count(text.begin(), text.end(), '\n'));
}

std::string logged(LogLevel level, bool json) {
  Pipe pipe;
  const Log log(level, json, pipe.writer());
  log.debug("unseen");
  log.info("ready", {{"port", std::int64_t{5}}, {"name", std::string("a\"\xff")}});
  log.flush();
  return pipe.read();
}

TEST(LogTest, WritesOneLinePerEvent) {
  const std::string json = logged(LogLevel::kInfo, true);
  EXPECT_TRUE(
      json.starts_with("{\"event\":\"ready\",\"port\":5,\"name\":\"a\\\"\xef\xbf\xbd\","
                       "\"level\":\"info\",\"timestamp\":\"20"))
      << json;
  EXPECT_EQ(lines_of(json), 1u);
  EXPECT_NE(logged(LogLevel::kInfo, false).find(" [info] ready port=5 name="), std::string::npos);
  EXPECT_EQ(logged(LogLevel::kError, true), "");
}

TEST(LogTest, LosesNothingThatFitsAndKeepsTheOrderOfAThread) {
  constexpr int kThreads = 4;
  constexpr int kLines = 2'000;
  Pipe pipe;
  std::string all;
  {
    const Log log(LogLevel::kInfo, false, pipe.writer());
    std::vector<std::jthread> threads;
    for (int t = 0; t < kThreads; ++t) {
      threads.emplace_back([&log, t] {
        for (std::int64_t i = 0; i < kLines; ++i) log.info(text("thread", t), {{"at", i}});
      });
    }
    while (lines_of(all) < kThreads * kLines) all += pipe.read(/*wait=*/true);
    EXPECT_EQ(log.dropped_lines(), 0u);
  }
  for (int t = 0; t < kThreads; ++t) {
    std::size_t at = 0;
    for (int i = 0; i < kLines; ++i) {
      at = all.find(text(" [info] thread", t, " at=", i, "\n"), at);
      ASSERT_NE(at, std::string::npos) << t << " " << i;
    }
  }
}

TEST(LogTest, AnUnreadPipeCostsLinesAndNoTime) {
  constexpr std::uint64_t kLines = 3 * LogWriter::kMaxLines;
  Pipe pipe;
  std::uint64_t dropped = 0;
  {
    const Log log(LogLevel::kInfo, true, pipe.writer());
    for (std::uint64_t i = 0; i < kLines; ++i) log.info("again");
    dropped = log.dropped_lines();
    EXPECT_GE(dropped, kLines - LogWriter::kMaxLines - 65'536 / 50);
    EXPECT_LT(dropped, kLines);
  }
  // Ended, though its thread still waits for a reader; every line that was not dropped comes then.
  std::string all;
  while (lines_of(all) < kLines - dropped) all += pipe.read(/*wait=*/true);
  EXPECT_EQ(lines_of(all), kLines - dropped);
}

TEST(LogTest, ALargeLineIsWrittenAndALargerOneIsDropped) {
  Pipe pipe;
  const Log log(LogLevel::kInfo, false, pipe.writer());
  log.info("large", {{"held", std::string(100'000, 'x')}});
  std::string all;
  while (lines_of(all) < 1) all += pipe.read(/*wait=*/true);
  EXPECT_GT(all.size(), 100'000u);
  log.info("too_large", {{"held", std::string(LogWriter::kMaxBytes, 'x')}});
  EXPECT_EQ(log.dropped_lines(), 1u);
}

TEST(LogTest, AClosedPipeAndAFullDiskCostLinesOnly) {
  std::signal(SIGPIPE, SIG_IGN);
  Pipe pipe;
  pipe.close_reader();
  const Log broken(LogLevel::kInfo, true, pipe.writer());
  for (int i = 0; i < 100; ++i) broken.info("lost");
  broken.flush();
  EXPECT_EQ(broken.dropped_lines(), 100u);

  const int full = ::open("/dev/full", O_WRONLY | O_CLOEXEC);
  ASSERT_GE(full, 0);
  {
    const Log log(LogLevel::kInfo, true, full);
    for (int i = 0; i < 100; ++i) log.info("lost");
    log.flush();
    EXPECT_EQ(log.dropped_lines(), 100u);
  }
  ::close(full);
}

TEST(LogTest, ASharedDescriptorThatDoesNotBlockIsWaitedFor) {
  constexpr std::uint64_t kLines = 5'000;
  Pipe pipe;
  ::fcntl(pipe.writer(), F_SETFL, O_NONBLOCK);
  const Log log(LogLevel::kInfo, true, pipe.writer());
  for (std::uint64_t i = 0; i < kLines; ++i) log.info("again");
  std::string all;
  while (lines_of(all) < kLines) all += pipe.read(/*wait=*/true);
  EXPECT_EQ(log.dropped_lines(), 0u);
}

TEST(LogTest, WarningsThatClientsCauseAreLimited) {
  constexpr int kWarnings = 1'000;
  Pipe pipe;
  const Log log(LogLevel::kInfo, false, pipe.writer());
  for (int i = 0; i < kWarnings; ++i) log.client_warning("bad_frame");
  log.client_warning("accept");
  std::string all;
  // Told without another warning, when the second is over; on a slow machine in several windows.
  const std::string tells = "suppressed suppressed=\"bad_frame\" lines=";
  int seen = 0;
  while (seen < kWarnings) {
    all += pipe.read(/*wait=*/true);
    seen = static_cast<int>(lines_of(all)) - 1;
    for (std::size_t at = 0; (at = all.find(tells, at)) != std::string::npos;) {
      at += tells.size();
      seen += std::stoi(all.substr(at)) - 1;
    }
  }
  EXPECT_EQ(seen, kWarnings);
  EXPECT_NE(all.find(tells), std::string::npos);
  EXPECT_NE(all.find("[warning] accept\n"), std::string::npos);
  EXPECT_EQ(log.dropped_lines(), 0u);
}

TEST(RateLimitTest, TenASecondPass) {
  using std::chrono::milliseconds;
  const TimePoint begin{std::chrono::seconds(100)};
  RateLimit limit;
  for (int i = 0; i < 10; ++i) EXPECT_TRUE(limit.passes(begin + milliseconds(i)));
  EXPECT_EQ(limit.told_at(), kNever);
  EXPECT_FALSE(limit.passes(begin + milliseconds(999)));
  EXPECT_FALSE(limit.passes(begin + milliseconds(999)));
  EXPECT_EQ(limit.told_at(), begin + milliseconds(1'000));
  EXPECT_EQ(limit.take_suppressed(), 2u);
  EXPECT_EQ(limit.told_at(), kNever);
  EXPECT_TRUE(limit.passes(begin + milliseconds(1'000)));
}

}  // namespace
}  // namespace tessera
