// Work while CPUs have nothing else to do, and what happens where they always have.
#include "csrc/idle_thread.h"

#include <gtest/gtest.h>
#include <sched.h>

#include <atomic>
#include <stdexcept>
#include <thread>
#include <vector>

#include "common/clock.h"

namespace tessera {
namespace {

using namespace std::chrono_literals;

TEST(IdleThreadTest, WorkIsDoneOnceOnAThreadOfTheClass) {
  std::vector<int> classes;
  std::thread::id thread;
  run_on_idle_thread(
      [&](const std::stop_token&) {
        classes.push_back(::sched_getscheduler(0));
        thread = std::this_thread::get_id();
      },
      {.share = 0});
  EXPECT_EQ(classes, std::vector{SCHED_IDLE});
  EXPECT_NE(thread, std::this_thread::get_id());
  EXPECT_NE(::sched_getscheduler(0), SCHED_IDLE);
}

TEST(IdleThreadTest, TheCallingThreadGoesOnWhereTheOtherHasTooLittleOfACpu) {
  std::vector<int> pieces;
  std::vector<std::thread::id> threads;
  int stopped = 0;
  // Where all CPUs are in use, the other thread may not have begun when it is given up.
  for (int i = 0; i < 100 && threads.size() < 2; ++i) {
    pieces.clear();
    threads.clear();
    run_on_idle_thread(
        [&](const std::stop_token& stop) {
          threads.push_back(std::this_thread::get_id());
          // A thread that sleeps has none, as one that waits for a CPU.
          while (pieces.size() < 3) {
            if (stop.stop_possible()) {
              while (!stop.stop_requested()) std::this_thread::sleep_for(1ms);
            }
            pieces.push_back(static_cast<int>(pieces.size()));
            if (stop.stop_requested()) {
              ++stopped;
              return;
            }
          }
        },
        {.share = 0.5, .length = 20ms});
  }
  EXPECT_EQ(pieces, (std::vector{0, 1, 2}));
  EXPECT_EQ(stopped, 1);
  ASSERT_EQ(threads.size(), 2U);
  EXPECT_NE(threads[0], std::this_thread::get_id());
  EXPECT_EQ(threads[1], std::this_thread::get_id());
}

TEST(IdleThreadTest, WorkThatHasEnoughIsLeftWhereItIs) {
  int calls = 0;
  run_on_idle_thread(
      [&](const std::stop_token&) {
        ++calls;
        const Duration begin = thread_cpu_time();
        while (thread_cpu_time() - begin < 8ms) {
        }
      },
      {.share = 0, .length = 1ms});
  EXPECT_EQ(calls, 1);
}

TEST(IdleThreadTest, FailuresOfEitherThreadAreThrown) {
  EXPECT_THROW(
      run_on_idle_thread([](const std::stop_token&) { throw std::runtime_error("first"); }),
      std::runtime_error);
  const auto second = [](const std::stop_token& stop) {
    if (!stop.stop_possible()) throw std::invalid_argument("second");
    while (!stop.stop_requested()) std::this_thread::sleep_for(1ms);
  };
  EXPECT_THROW(run_on_idle_thread(second, {.share = 0.5, .length = 20ms}), std::invalid_argument);
}

// Where all CPUs are busy, a thread of the class may begin only much later, and nobody waits for
// it.
TEST(IdleThreadTest, TheCallingThreadDoesTheWorkThatTheOtherHasNotBegun) {
  std::atomic<bool> done = false;
  std::vector<std::jthread> busy;
  for (unsigned i = 0; i < 2 * std::thread::hardware_concurrency(); ++i) {
    busy.emplace_back([&done] {
      while (!done) {
      }
    });
  }
  for (int i = 0; i < 20; ++i) {
    int ends = 0;
    run_when_idle(
        [&](const std::stop_token& stop) {
          if (!stop.stop_requested()) ++ends;
        },
        {.share = 0.02, .length = 1ms});
    EXPECT_GE(ends, 1);
    EXPECT_LE(ends, 2);  // it had ended when it was asked to stop
  }
  done = true;
}

TEST(IdleThreadTest, WhatNobodyUsesOfTheCpusIsAShare) {
  IdleTime idle;
  const double first = idle.share();
  EXPECT_GE(first, 0);
  EXPECT_LE(first, 1);
  EXPECT_EQ(idle.share(), first);  // the time is too short for another
  std::atomic<bool> done = false;
  std::vector<std::jthread> busy;
  for (unsigned i = 0; i < std::thread::hardware_concurrency(); ++i) {
    busy.emplace_back([&done] {
      while (!done) {
      }
    });
  }
  std::this_thread::sleep_for(300ms);
  EXPECT_LT(idle.share(), 0.5);
  done = true;
}

TEST(IdleThreadTest, StarvationIsTooLittleOfACpuOverAWholeLength) {
  Starvation starvation(CLOCK_THREAD_CPUTIME_ID, {.share = 0.02, .length = 30ms});
  EXPECT_FALSE(starvation.seen());  // no length is whole
  const Duration begin = thread_cpu_time();
  while (thread_cpu_time() - begin < 40ms) {
  }
  EXPECT_FALSE(starvation.seen());
  std::this_thread::sleep_for(300ms);  // asking for the time may use 6 ms of a CPU
  EXPECT_TRUE(starvation.seen());
  EXPECT_FALSE(starvation.seen());  // the next one has begun
}

}  // namespace
}  // namespace tessera
