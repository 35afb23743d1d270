// The event loop: order of work, wake-ups from other threads, timers, removal in the middle of a
// turn.
#include "http2/event_loop.h"

#include <gtest/gtest.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <functional>
#include <memory>
#include <semaphore>
#include <thread>
#include <vector>

#include "http2/socket.h"

namespace tessera::http2 {
namespace {

using namespace std::chrono_literals;

struct Call final : EventLoop::Task {
  explicit Call(std::function<void()> what) : action(std::move(what)) {}
  void run() override { action(); }
  std::function<void()> action;
};

struct Pair {
  Pair() {
    std::array<int, 2> made{};
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, made.data()), 0);
    ours = Socket(made[0]);
    theirs = Socket(made[1]);
  }
  Socket ours;
  Socket theirs;
};

TEST(EventLoopTest, RunsWhatIsPostedInOrderAndEverythingBeforeItStops) {
  EventLoop loop;
  std::vector<int> seen;
  std::vector<std::unique_ptr<Call>> calls;
  for (int i = 0; i < 100; ++i) {
    calls.push_back(std::make_unique<Call>([&seen, i] { seen.push_back(i); }));
    loop.post(*calls.back());
  }
  loop.stop();
  loop.run();
  ASSERT_EQ(seen.size(), 100u);
  for (int i = 0; i < 100; ++i) EXPECT_EQ(seen[static_cast<std::size_t>(i)], i);
}

TEST(EventLoopTest, ThreadsWakeASleepingLoopEveryTime) {
  EventLoop loop;
  std::jthread thread([&] { loop.run(); });
  std::atomic<int> ran = 0;
  {
    std::vector<std::jthread> posters;
    posters.reserve(3);
    for (int p = 0; p < 3; ++p) {
      posters.emplace_back([&] {
        std::binary_semaphore done(0);
        Call call([&] {
          ran.fetch_add(1);
          done.release();
        });
        for (int i = 0; i < 2'000; ++i) {
          loop.post(call);
          done.acquire();
        }
      });
    }
  }
  EXPECT_EQ(ran, 6'000);
  loop.stop();
}

TEST(EventLoopTest, ATaskMayPostItselfAgain) {
  EventLoop loop;
  int left = 1'000;
  Call again([] {});
  again.action = [&] {
    if (--left > 0) {
      loop.post(again);
    } else {
      loop.stop();
    }
  };
  loop.post(again);
  loop.run();
  EXPECT_EQ(left, 0);
}

TEST(EventLoopTest, RunsTimersInTheOrderOfTheirTimes) {
  EventLoop loop;
  std::vector<int> seen;
  EventLoop::Timer late([&] {
    seen.push_back(2);
    loop.stop();
  });
  EventLoop::Timer moved([&] { seen.push_back(1); });
  EventLoop::Timer never([&] { seen.push_back(9); });
  const TimePoint now = loop.now();
  loop.schedule(never, now);
  loop.schedule(late, now + 4ms);
  loop.schedule(moved, now + 1h);
  loop.schedule(moved, now + 2ms);
  loop.cancel(never);
  loop.run();
  EXPECT_EQ(seen, (std::vector<int>{1, 2}));
  EXPECT_GE(loop.now(), now + 4ms);
}

struct Reader final : EventLoop::Handler {
  explicit Reader(std::function<void()> what) : action(std::move(what)) {}
  void on_ready(std::uint32_t) override { action(); }
  std::function<void()> action;
};

TEST(EventLoopTest, AHandlerThatWasRemovedHearsNoMoreInTheSameTurn) {
  EventLoop loop;
  Pair one;
  Pair other;
  int heard = 0;
  Reader first([] {});
  Reader second([] {});
  first.action = second.action = [&] {
    ++heard;
    loop.remove(one.ours.descriptor(), first);
    loop.remove(other.ours.descriptor(), second);
    loop.stop();
  };
  ASSERT_TRUE(loop.add(one.ours.descriptor(), EPOLLIN, first));
  ASSERT_TRUE(loop.add(other.ours.descriptor(), EPOLLIN, second));
  const std::array<std::byte, 1> byte{};
  one.theirs.write(byte);
  other.theirs.write(byte);
  loop.run();
  EXPECT_EQ(heard, 1);
}

struct Counted final : EventLoop::Deferred {
  void on_turn_end() override { ++runs; }
  int runs = 0;
};

TEST(EventLoopTest, WhatIsDeferredRunsOnceInATurnAndNotWhenForgotten) {
  EventLoop loop;
  Counted counted;
  Counted forgotten;
  Call call([&] {
    for (int i = 0; i < 3; ++i) loop.defer(counted);
    loop.defer(forgotten);
    loop.forget(forgotten);
    EXPECT_EQ(counted.runs, 0);
  });
  loop.post(call);
  loop.stop();
  loop.run();
  EXPECT_EQ(counted.runs, 1);
  EXPECT_EQ(forgotten.runs, 0);
}

TEST(SocketTest, SaysWhenItIsBlockedAndWhenTheOtherSideHasGone) {
  Pair pair;
  std::vector<std::byte> bytes(1 << 20);
  const Moved written = pair.ours.write(bytes);
  EXPECT_TRUE(written.blocked);
  EXPECT_FALSE(written.ended);
  EXPECT_GT(written.bytes, 0u);
  std::size_t read = 0;
  Moved moved;
  while (!(moved = pair.theirs.read(bytes)).blocked) read += moved.bytes;
  EXPECT_EQ(read + moved.bytes, written.bytes);
  pair.ours.end_writing();
  EXPECT_TRUE(pair.theirs.read(bytes).ended);
  pair.theirs = Socket();
  EXPECT_TRUE(pair.ours.write(bytes).ended);
}

}  // namespace
}  // namespace tessera::http2
