// How long work beside answering pauses.
#include "common/pace.h"
#include "common/cpus.h"
#include "common/short_slices.h"
#include "common/stand_aside.h"
#include "csrc/idle_thread.h"
#include "csrc/pauses.h"

#include <gtest/gtest.h>
#include <pthread.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstddef>
#include <functional>
#include <system_error>
#include <thread>

namespace tessera {
namespace {

using namespace std::chrono_literals;

// Uses so much of a CPU.
void compute(Duration length) {
  const Duration begin = thread_cpu_time();
  while (thread_cpu_time() - begin < length) {
  }
}

TEST(PaceTest, ThePauseLeavesTheWorkItsShareOfACpu) {
  EXPECT_EQ(pause_behind(1ms, 1ms, 0.25), 3ms);
  EXPECT_EQ(pause_behind(1ms, 2ms, 0.25), 2ms);    // it has waited for something meanwhile
  EXPECT_EQ(pause_behind(20us, 20us, 0.25), 0ms);  // not worth a sleep
  EXPECT_EQ(pause_behind(1s, 1s, 0.25), 50ms);
}

TEST(PaceTest, APieceThatHasWaitedForACpuIsFollowedByAPause) {
  EXPECT_EQ(pause_behind(1ms, 10ms, 0.25), 100us);
  EXPECT_EQ(pause_behind(100us, 1s, 0.25), 100us);
  EXPECT_EQ(pause_behind(99us, 1s, 0.25), 0us);
  EXPECT_EQ(pause_behind(1ms, 1050us, 1), 100us);
  EXPECT_EQ(pause_behind(1ms, 1049us, 1), 0us);
}

TEST(PaceTest, TheShareIsATenthOfAllCpusAndNoMoreThanOne) {
  EXPECT_DOUBLE_EQ(aside_share(1), 0.1);
  EXPECT_DOUBLE_EQ(aside_share(2), 0.2);
  EXPECT_DOUBLE_EQ(aside_share(4), 0.4);
  EXPECT_DOUBLE_EQ(aside_share(64), 1);
}

TEST(PaceTest, WorkThatRunsWhileNothingElseDoesMayHaveAQuarter) {
  EXPECT_DOUBLE_EQ(idle_share(1), 0.25);
  EXPECT_DOUBLE_EQ(idle_share(2), 0.5);
  EXPECT_DOUBLE_EQ(idle_share(64), 1);
}

// So little of the share of work aside that it pauses on a machine of any number of CPUs.
constexpr double kLittle = 0.1;

TEST(PaceTest, AThreadOfTheIdleClassHasTheShareOfItsClassAsLongAsItWorks) {
  const int cpus = available_cpus();
  Pace pace([] { return true; }, CLOCK_THREAD_CPUTIME_ID, kLittle);
  EXPECT_DOUBLE_EQ(pace.share(), kLittle * aside_share(cpus));
  std::thread([&] {
    ASSERT_TRUE(be_idle());
    pace.rest();  // this thread goes on with the work
    EXPECT_DOUBLE_EQ(pace.share(), kLittle * idle_share(cpus));
    EXPECT_DOUBLE_EQ(Pace().share(), idle_share(cpus));
  }).join();
  pace.rest();
  EXPECT_DOUBLE_EQ(pace.share(), kLittle * aside_share(cpus));
}

TEST(PaceTest, WorkPausesUntilASecondAfterTheLastCall) {
  bool answering = true;
  int pauses = 0;
  Pace pace([&] { return answering; }, CLOCK_THREAD_CPUTIME_ID, kLittle);
  const auto work = [&] {
    compute(1ms);
    pace.rest([&](const std::function<void()>&) { ++pauses; });
  };
  for (int piece = 0; piece < 3; ++piece) work();
  EXPECT_EQ(pauses, 3);
  answering = false;
  std::this_thread::sleep_for(1'100ms);
  const int before = pauses;
  for (int piece = 0; piece < 5; ++piece) work();
  EXPECT_EQ(pauses, before);
}

TEST(PaceTest, APauseEndsWhileNothingIsBeingAnswered) {
  int asked = 0;
  // One call is being answered when the pause begins and for a while behind it.
  Pace pace([&] { return ++asked < 4; }, CLOCK_THREAD_CPUTIME_ID, kLittle);
  while (asked < 4) {
    compute(1ms);
    pace.rest();
  }
  EXPECT_EQ(asked, 4);  // before the pause, and three times behind it
}

TEST(PaceTest, AnotherThreadGoesOnWithoutPayingForWhatTheFirstOneUsed) {
  int pauses = 0;
  Pace pace([] { return true; }, CLOCK_THREAD_CPUTIME_ID, kLittle);
  const auto rest = [&] { pace.rest([&](const std::function<void()>&) { ++pauses; }); };
  std::thread([&] {
    compute(20ms);
    rest();
  }).join();
  EXPECT_EQ(pauses, 0);
  while (pauses == 0) {
    compute(1ms);
    rest();
  }
}

TEST(PaceTest, AThreadStandsAsideAndItsOwnThreadsDo) {
  int own = 0;
  int later = 0;
  std::thread([&] {
    stand_aside();
    own = ::getpriority(PRIO_PROCESS, static_cast<id_t>(::gettid()));
    std::thread([&] { later = ::getpriority(PRIO_PROCESS, static_cast<id_t>(::gettid())); }).join();
  }).join();
  EXPECT_GE(own, kAsideNiceness);
  EXPECT_EQ(later, own);
}

TEST(PaceTest, AThreadTakesShortSlicesAndKeepsItsPriority) {
  if (scheduling_attributes().runtime == 0) {
    GTEST_SKIP() << "the kernel knows no slices of threads";
  }
  SchedulingAttributes found;
  std::thread([&] {
    stand_aside();
    EXPECT_NE(scheduling_attributes().runtime, kShortSlice);
    take_short_slices();
    found = scheduling_attributes();
  }).join();
  EXPECT_EQ(found.runtime, kShortSlice);
  EXPECT_EQ(found.policy, static_cast<std::uint32_t>(SCHED_OTHER));
  EXPECT_GE(found.nice, kAsideNiceness);
  EXPECT_NE(scheduling_attributes().runtime, kShortSlice);  // of that thread alone
}

TEST(PaceTest, WorkIsDoneWhereTheSystemGivesNoThread) {
  pthread_attr_t before;
  pthread_attr_t huge;
  ASSERT_EQ(::pthread_getattr_default_np(&before), 0);
  ASSERT_EQ(::pthread_getattr_default_np(&huge), 0);
  // No address space has room for such a stack.
  ASSERT_EQ(::pthread_attr_setstacksize(&huge, std::size_t{1} << 47), 0);
  ASSERT_EQ(::pthread_setattr_default_np(&huge), 0);
  EXPECT_THROW(std::thread([] {}).join(), std::system_error);
  bool done = false;
  stand_aside([&] { done = true; });
  ::pthread_setattr_default_np(&before);
  EXPECT_TRUE(done);
}

}  // namespace
}  // namespace tessera
