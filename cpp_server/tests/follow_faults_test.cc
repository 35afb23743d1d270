// A followed version for which the system has no memory, no descriptor or no time at the wrong
// moment: a state is whole afterwards, and the commit is taken once there is.
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <limits>
#include <new>
#include <stdexcept>
#include <thread>
#include <vector>

#include "failing_memory.h"
#include "follow/fence.h"
#include "follow_support.h"
#include "model/golden.h"

namespace tessera {
namespace {

using namespace std::chrono_literals;
using test::FollowTest;
using test::kRows;
using test::TableRunner;
using Outcome = FollowedVersion::Outcome;

TEST_F(FollowTest, AModelWithoutMemoryForItsGoldenAnswersIsAskedAgain) {
  publish(1, 1, base);
  runner.before_forward = [] { throw std::bad_alloc(); };
  EXPECT_EQ(followed->poll(), Outcome::kIdle);
  EXPECT_EQ(refused("memory"), 1u);
  EXPECT_EQ(metrics.trouble(), "commit 1: there is no memory for it");
  expect_state(0);
  runner.before_forward = nullptr;
  EXPECT_EQ(followed->poll(), Outcome::kIdle);  // not so soon
  clock.advance(5s);
  EXPECT_EQ(followed->poll(), Outcome::kChanged);
  expect_state(1);
}

TEST_F(FollowTest, WhatATraceSaysIsOneLine) {
  publish(1, 1, base);
  runner.before_forward = [] {
    throw std::runtime_error(
        "The following operation failed in the TorchScript interpreter.\nTraceback:\n  there\n"
        "RuntimeError: too large\n");
  };
  EXPECT_EQ(followed->poll(), Outcome::kIdle);
  EXPECT_EQ(refused("golden"), 1u);
  EXPECT_EQ(metrics.trouble(), "commit 1: cannot be called: RuntimeError: too large");
}

// What the file permissions of `path` forbid, for as long as it lives; root may do everything.
class Forbidden {
 public:
  explicit Forbidden(const std::string& path, mode_t mode) : path_(path) {
    ::chmod(path.c_str(), mode);
    constexpr uid_t kNobody = 65'534;
    if (::geteuid() == 0) root_ = ::seteuid(kNobody) == 0;
    holds_ = ::geteuid() != 0;
  }
  ~Forbidden() {
    if (root_ && ::seteuid(0) != 0) std::abort();
    ::chmod(path_.c_str(), 0755);
  }
  Forbidden(const Forbidden&) = delete;
  Forbidden& operator=(const Forbidden&) = delete;
  bool holds() const { return holds_; }

 private:
  const std::string path_;
  bool root_ = false;
  bool holds_ = false;
};

TEST_F(FollowTest, AFileThatCouldNotBeReadIsReadAgain) {
  publish(1, 1, base);
  {
    const Forbidden unreadable(folder + "/00000001.commit", 0);
    if (!unreadable.holds()) GTEST_SKIP() << "this process can read everything";
    EXPECT_EQ(followed->poll(), Outcome::kIdle);
  }
  EXPECT_EQ(refused("damaged"), 1u);
  EXPECT_EQ(metrics.trouble(), "commit 1: cannot be read: Permission denied");
  clock.advance(5s);
  EXPECT_EQ(followed->poll(), Outcome::kChanged);
  expect_state(1);
}

TEST_F(FollowTest, AFolderThatCannotBeReadIsToldAndNotTakenForAnEmptyOne) {
  publish(1, 1, base);
  {
    const Forbidden unreadable(folder, 0311);
    if (!unreadable.holds()) GTEST_SKIP() << "this process can read everything";
    EXPECT_EQ(followed->poll(), Outcome::kIdle);
    EXPECT_EQ(followed->poll(), Outcome::kIdle);
  }
  EXPECT_EQ(refused("damaged"), 1u);
  EXPECT_EQ(metrics.trouble(), "commit 1: " + folder + ": cannot be read (Permission denied)");
  EXPECT_EQ(followed->poll(), Outcome::kChanged);
  expect_state(1);
}

TEST_F(FollowTest, ACommitIsStagedAgainOnAThreadThatGetsOnWhereTheFirstDoesNot) {
  constexpr std::int64_t kCommits = 20;
  publish(1, kCommits, base);
  TableRunner other;
  CommitLock other_commits;
  const auto version = open(other, other_commits, {.idle_thread_gets_on = [] { return true; }});
  std::vector<bool> idle;
  other.before_stage = [&] {
    idle.push_back(::sched_getscheduler(0) == SCHED_IDLE);
    // It has nothing of a CPU, as on a machine whose CPUs are all in use.
    if (idle.back()) std::this_thread::sleep_for(500ms);
  };
  // Where all CPUs are in use now, the first thread may not have begun when the other takes over.
  std::int64_t number = 0;
  do {
    idle.clear();
    EXPECT_EQ(version->poll(), Outcome::kChanged);
    EXPECT_EQ(version->state().number, ++number);
  } while (idle.size() < 2 && number < kCommits);
  EXPECT_EQ(idle, (std::vector{true, false}));
}

TEST_F(FollowTest, ACommitThatIsBeingReadIsLeftWhereTheServerStops) {
  bool stopping = true;
  TableRunner other;
  CommitLock other_commits;
  const auto version = open(other, other_commits, {.stopping = [&] { return stopping; }});
  publish(1, 1, base);
  EXPECT_EQ(version->poll(), Outcome::kIdle);
  EXPECT_EQ(metrics.trouble(), "");
  EXPECT_EQ(version->state().number, 0);
  stopping = false;
  EXPECT_EQ(version->poll(), Outcome::kChanged);
  EXPECT_EQ(version->state().number, 1);
}

// Who wants to go back does not wait until a large commit has been read.
TEST_F(FollowTest, ACommitThatIsBeingReadIsLeftForOtherCalls) {
  constexpr std::int64_t kCommits = 60;
  TableRunner other;
  CommitLock other_commits;
  const auto version = open(other, other_commits, {.stopping = [] {
                              std::this_thread::sleep_for(5ms);
                              return false;
                            }});
  publish(1, kCommits, base);
  std::atomic<bool> done = false;
  std::jthread asking([&] {
    while (!done) version->state();
  });
  bool left = false;
  for (int i = 0; i < kCommits && !left; ++i) left = version->poll() == Outcome::kIdle;
  done = true;
  asking.join();
  EXPECT_TRUE(left);
  EXPECT_EQ(metrics.trouble(), "");
  take_all(*version);
  EXPECT_EQ(version->state().number, kCommits);
}

// A clock that is read last before bytes change, and first under the lock.
class ArmingClock final : public Clock {
 public:
  TimePoint now() const override {
    if (armed) test::fail_allocation_after(allocations);
    return TimePoint(1000s);
  }
  bool armed = false;
  int allocations = 0;
};

// Wherever memory runs out once bytes are about to change, state and bytes are those of one commit,
// and what was to be done is done at another try.
TEST_F(FollowTest, NoAllocationThatFailsLeavesHalfAStep) {
  publish(1, 3, base);
  int failed = 0;
  for (int allocations = 0;; ++allocations) {
    ArmingClock arming;
    UndoRecords records(1U << 20);
    TableRunner table;
    CommitLock lock;
    FollowMetrics counted;
    FollowedVersion version(
        {.model = "m", .version = 3, .base = base, .sha256 = base}, folder,
        {.schema = schema, .runner = table, .commits = lock, .metrics = counted}, {}, records,
        arming, log);
    bool any = false;
    const auto step = [&] {
      arming.armed = true;
      arming.allocations = allocations;
      try {
        version.poll();
      } catch (const std::bad_alloc&) {
      }
      arming.armed = false;
      any = test::has_allocation_failed() || any;
      const auto number = version.state().number;
      EXPECT_EQ(lock.commit, number) << allocations;
      EXPECT_EQ(table.table.numbers, std::vector<float>(kRows, static_cast<float>(number)))
          << allocations;
    };
    std::filesystem::remove(folder + "/fenced.json");
    step();
    step();
    step();
    write_fence(folder, {{2, ""}, {3, ""}});
    step();
    std::filesystem::remove(folder + "/fenced.json");
    failed += any ? 1 : 0;
    if (!any) break;
  }
  EXPECT_GT(failed, 1);
}

TEST_F(FollowTest, GoesBackByAllCommitsOrByNone) {
  publish(1, 3, base);
  take_all(*followed);
  write_fence(folder, {{1, ""}});
  int swaps = 0;
  runner.before_swap = [&] {
    if (++swaps == 2) throw std::bad_alloc();
  };
  EXPECT_THROW(followed->poll(), std::bad_alloc);
  expect_state(3);
  runner.before_swap = nullptr;
  EXPECT_EQ(followed->poll(), Outcome::kChanged);
  expect_state(0);
}

TEST(GoldenAnswersTest, HaveAsManySamplesAsAnswers) {
  InputSchema schema = test::schema();
  schema.dense_features.clear();
  std::string golden = test::golden_file(0, 0);
  const auto dense = golden.find("[1,2]");
  ASSERT_NE(dense, std::string::npos);
  golden.replace(dense, 5, "[8,0]");
  const auto places = golden.find("[0,8]");
  ASSERT_NE(places, std::string::npos);
  golden.replace(places, 5, "[0,0]");
  try {
    const GoldenAnswers answers(as_bytes(std::span(golden)), schema);
    FAIL();
  } catch (const std::runtime_error& error) {
    EXPECT_NE(std::string(error.what()).find("8 samples"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace tessera
