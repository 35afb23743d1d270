// Many at once, or one alone, who is preferred.
#include "common/reader_writer_lock.h"

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <future>
#include <thread>
#include <vector>

namespace tessera {
namespace {

// Plain numbers, so that ThreadSanitizer sees who looks without having passed.
TEST(ReaderWriterLockTest, ReadersSeeAWholeChange) {
  constexpr int kChanges = 2'000;
  ReaderWriterLock lock;
  std::array<int, 64> numbers{};
  std::atomic<bool> done = false;
  std::atomic<int> torn = 0;
  std::atomic<std::int64_t> passed = 0;
  {
    std::vector<std::jthread> readers;
    for (int i = 0; i < 4; ++i) {
      readers.emplace_back([&] {
        while (!done) {
          const SharedHold hold(&lock);
          for (const int number : numbers) torn += number != numbers.front() ? 1 : 0;
          ++passed;
        }
      });
    }
    while (passed == 0) std::this_thread::yield();
    std::vector<std::jthread> writers;
    for (int i = 0; i < 2; ++i) {
      writers.emplace_back([&] {
        for (int change = 0; change < kChanges; ++change) {
          const ExclusiveHold hold(lock);
          for (int& number : numbers) ++number;
        }
      });
    }
    writers.clear();
    done = true;
  }
  EXPECT_EQ(torn, 0);
  EXPECT_EQ(numbers.front(), 2 * kChanges);
}

TEST(ReaderWriterLockTest, NobodyReadsWhileSomebodyWrites) {
  ReaderWriterLock lock;
  const std::size_t slot = lock.lock_shared();
  std::promise<void> alone;
  std::promise<void> enough;
  std::thread writer([&] {
    lock.lock();
    alone.set_value();
    enough.get_future().wait();
    lock.unlock();
  });
  std::future<void> has_it = alone.get_future();
  EXPECT_EQ(has_it.wait_for(std::chrono::seconds(0)), std::future_status::timeout);
  lock.unlock_shared(slot);
  has_it.wait();
  std::atomic<bool> went_in = false;
  std::thread later([&] {
    const SharedHold hold(&lock);
    went_in = true;
  });
  EXPECT_FALSE(went_in);
  enough.set_value();
  writer.join();
  later.join();
  EXPECT_TRUE(went_in);
}

TEST(ReaderWriterLockTest, WithoutALockNothingIsWaitedFor) {
  const SharedHold hold(nullptr);
  ReaderWriterLock lock;
  const SharedHold first(&lock);
  std::thread([&] { const SharedHold second(&lock); }).join();
}

}  // namespace
}  // namespace tessera
