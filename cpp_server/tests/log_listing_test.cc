// The names in a log's folder, who adds to its fence, and who looks at it.
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "common/file_lock.h"
#include "common/flags.h"
#include "failing_memory.h"
#include "follow/fence.h"
#include "follow/follower.h"
#include "follow/log_listing.h"
#include "follow_support.h"

namespace tessera {
namespace {

using namespace std::chrono_literals;
using test::FollowTest;

// Each look at it takes a second.
class SlowClock final : public Clock {
 public:
  TimePoint now() const override { return TimePoint(++*seconds_ * 1s); }
  void advance(int by) { *seconds_ += by; }

 private:
  const std::unique_ptr<int> seconds_ = std::make_unique<int>(1000);
};

TEST_F(FollowTest, TheFolderIsListedSeldomWhereThatTakesLong) {
  const auto put_empty = [&](CommitNumber number) {
    std::ofstream file(folder + "/" + commit_name(number));
  };
  SlowClock slow;
  LogListing listing(folder, slow);
  using Numbers = std::set<CommitNumber>;
  put_empty(1);
  put_empty(3);
  EXPECT_EQ(listing.numbers_from(1), Numbers{1});
  EXPECT_EQ(listing.numbers_from(2), Numbers{3});  // this one has listed the folder
  put_empty(4);
  EXPECT_EQ(listing.numbers_from(2), Numbers{3});
  put_empty(2);
  EXPECT_EQ(listing.numbers_from(2), Numbers{2});
  std::filesystem::remove(folder + "/" + commit_name(2));
  slow.advance(100);
  EXPECT_EQ(listing.numbers_from(2), (Numbers{3, 4}));
  EXPECT_EQ(LogListing(folder + "/none", slow).numbers_from(1), Numbers{});
}

// Its first two looks are ten minutes apart, and the later ones none.
class StoppedClock final : public Clock {
 public:
  TimePoint now() const override {
    if (++*looks_ == 2) advance(10min);
    return TimePoint(1000s + *passed_);
  }
  void advance(Duration by) const { *passed_ += by; }

 private:
  const std::unique_ptr<int> looks_ = std::make_unique<int>(0);
  const std::unique_ptr<Duration> passed_ = std::make_unique<Duration>(0);
};

TEST_F(FollowTest, AListingThatStoodStillDoesNotPutOffTheNextOneForLong) {
  const StoppedClock stopped;
  LogListing listing(folder, stopped);
  using Numbers = std::set<CommitNumber>;
  EXPECT_EQ(listing.numbers_from(1), Numbers{});
  std::ofstream(folder + "/" + commit_name(2)).close();
  stopped.advance(29s);
  EXPECT_EQ(listing.numbers_from(1), Numbers{});
  stopped.advance(1s);
  EXPECT_EQ(listing.numbers_from(1), Numbers{2});
}

TEST_F(FollowTest, NobodyWhoAddsToAFenceLosesTheEntriesOfAnother) {
  constexpr CommitNumber kEach = 25;
  {
    std::vector<std::jthread> writers;
    for (CommitNumber writer = 0; writer < 4; ++writer) {
      writers.emplace_back([this, writer] {
        for (CommitNumber i = 1; i <= kEach; ++i) write_fence(folder, {{writer * kEach + i, ""}});
      });
    }
  }
  EXPECT_EQ(read_fence(folder).size(), 4 * kEach);
}

TEST_F(FollowTest, ALockThatIsHeldForLongIsALine) {
  const std::string path = folder + "/.lock";
  const auto held = std::make_unique<FileLock>(path, 0s);
  try {
    const FileLock other(path, 20ms);
    ADD_FAILURE();
  } catch (const UsageError& error) {
    EXPECT_EQ(error.what(), path +
                                ": another process has held this lock for 0.02 s; try again, or "
                                "end that process");
  }
  EXPECT_THROW(FileLock(folder + "/none/.lock", 0s), UsageError);
}

// Who waits for the last share of a model sees it go for good: it is destroyed there.
TEST_F(FollowTest, AFollowerTakesNoShareOfAModelThatItIsNotToWatch) {
  ServerConfig config;
  config.workers = 1;
  const auto model = std::make_shared<ServedModel>(
      test::echo_package(), config, std::make_shared<ModelMetrics>("m", "3"), clock, log);
  model->follow(std::move(followed));
  Follower follower(Duration::zero(), nullptr, log);
  const auto alone = [&] { return model.use_count() == 1; };
  for (int round = 0; round < 100; ++round) {
    follower.watch(std::vector<std::weak_ptr<ServedModel>>(30, model));
    while (alone()) std::this_thread::yield();
    follower.watch({});
    while (!alone()) std::this_thread::yield();
    const auto end = std::chrono::steady_clock::now() + 500us;
    while (std::chrono::steady_clock::now() < end) ASSERT_TRUE(alone()) << round;
  }
}

// Workers that have begun end again where there is no memory for the next one.
TEST(ServedModelTest, NoMemoryForAWorkerIsAnErrorAndNoHang) {
  const SteadyClock clock;
  const Log log(LogLevel::kError, true);
  ServerConfig config;
  config.workers = 3;
  bool failed = true;
  for (int allocations = 0; failed; ++allocations) {
    LoadedPackage package = test::echo_package();
    auto metrics = std::make_shared<ModelMetrics>("m", "3");
    test::fail_allocation_after(allocations);
    try {
      const ServedModel model(std::move(package), config, metrics, clock, log);
      failed = test::has_allocation_failed();
    } catch (const std::bad_alloc&) {
      failed = test::has_allocation_failed();
      EXPECT_TRUE(failed);
    }
  }
}

}  // namespace
}  // namespace tessera
