// Memory of large tables: it is aligned, shared by content, used again, and goes back to the
// system.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "package/table_memory.h"

namespace tessera {
namespace {

using namespace std::chrono_literals;

constexpr std::uint64_t kMiB = 1U << 20;

std::uint64_t resident_bytes() {
  std::uint64_t pages = 0;
  std::uint64_t resident = 0;
  std::ifstream("/proc/self/statm") >> pages >> resident;
  return resident * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
}

// How much of it the system may take whenever it wants, and nobody uses.
std::uint64_t lazily_free_bytes() {
  std::ifstream smaps("/proc/self/smaps_rollup");
  for (std::string name; smaps >> name;) {
    std::uint64_t kib = 0;
    if (name == "LazyFree:" && smaps >> kib) return kib << 10;
  }
  return 0;
}

template <typename Condition>
bool comes_true(const Condition& condition) {
  for (int tries = 0; tries < 1'000 && !condition(); ++tries) std::this_thread::sleep_for(10ms);
  return condition();
}

void fill(const TableMemory& memory) { std::ranges::fill(memory.content(), std::byte{7}); }

TEST(TableMemoryTest, IsZeroAlignedAndOfItsSize) {
  SpareMemory spare;
  const TableMemory memory(5 * kMiB + 3, spare);
  ASSERT_EQ(memory.content().size(), 5 * kMiB + 3);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(memory.content().data()) % (2 * kMiB), 0u);
  EXPECT_TRUE(std::all_of(memory.content().begin(), memory.content().end(),
                          [](std::byte byte) { return byte == std::byte{0}; }));
  memory.content().back() = std::byte{1};
}

TEST(TableMemoryTest, GoesBackToTheSystemWhoeverLetsItGo) {
  constexpr std::uint64_t kBytes = 64 * kMiB;
  SpareMemory spare(0s);
  const std::uint64_t before = resident_bytes();
  std::shared_ptr<TableMemory> memory;
  std::jthread([&] {
    memory = std::make_shared<TableMemory>(kBytes, spare);
    fill(*memory);
  }).join();
  EXPECT_GE(resident_bytes(), before + kBytes / 2);
  memory.reset();
  EXPECT_TRUE(comes_true([&] { return resident_bytes() < before + kBytes / 8; }));
}

TEST(SpareMemoryTest, IsTheNextTablesOfItsSizeAndTheSystemsMeanwhile) {
  constexpr std::uint64_t kBytes = 16 * kMiB + 5;
  SpareMemory spare;
  const std::byte* place = nullptr;
  const std::uint64_t before = lazily_free_bytes();
  {
    const TableMemory first(kBytes, spare);
    fill(first);
    place = first.content().data();
    EXPECT_LT(lazily_free_bytes(), before + kBytes / 8);
  }
  EXPECT_GE(lazily_free_bytes(), before + kBytes / 8 * 7);
  const TableMemory second(kBytes, spare);
  EXPECT_EQ(second.content().data(), place);
  const TableMemory third(kBytes, spare);
  EXPECT_NE(third.content().data(), place);
  fill(second);
  EXPECT_LT(lazily_free_bytes(), before + kBytes / 8);
}

TEST(SpareMemoryTest, GoesBackAfterAWhile) {
  constexpr std::uint64_t kBytes = 64 * kMiB;
  SpareMemory spare(500ms);
  const std::uint64_t before = resident_bytes();
  {
    const TableMemory memory(kBytes, spare);
    fill(memory);
  }
  EXPECT_GE(resident_bytes(), before + kBytes / 2);
  EXPECT_TRUE(comes_true([&] { return resident_bytes() < before + kBytes / 8; }));
}

// What is kept never adds to what is in use.
TEST(SpareMemoryTest, MakesRoomForATableOfAnotherSize) {
  SpareMemory spare;
  const std::uint64_t before = lazily_free_bytes();
  {
    const TableMemory one(32 * kMiB, spare);
    const TableMemory two(30 * kMiB, spare);
    fill(one);
    fill(two);
  }
  ASSERT_GE(lazily_free_bytes(), before + 60 * kMiB);
  const TableMemory other(20 * kMiB, spare);
  EXPECT_LT(lazily_free_bytes(), before + 36 * kMiB);  // one of the two has gone
  const TableMemory larger(40 * kMiB, spare);
  EXPECT_LT(lazily_free_bytes(), before + 4 * kMiB);
}

TEST(SpareMemoryTest, ThreadsTakeAndKeepAtOnce) {
  SpareMemory spare(1ms);
  std::vector<std::jthread> threads;
  threads.reserve(4);
  for (int thread = 0; thread < 4; ++thread) {
    threads.emplace_back([&spare, thread] {
      for (int i = 0; i < 100; ++i) {
        const TableMemory memory(kMiB * (1 + static_cast<std::uint64_t>(i + thread) % 3), spare);
        const std::byte mark{static_cast<unsigned char>(thread)};
        memory.content().front() = memory.content().back() = mark;
        std::this_thread::yield();
        EXPECT_EQ(memory.content().front(), mark);
        EXPECT_EQ(memory.content().back(), mark);
      }
    });
  }
}

TEST(TableStoreTest, FindsATableByItsContentWhileSomebodyHasIt) {
  TableStore store;
  auto table = std::make_shared<TableMemory>(2 * kMiB);
  const RecordInfo whole{.sha256 = "aa", .bytes = 2 * kMiB, .crc32 = 1, .chunks = {}};
  RecordInfo shorter = whole;
  shorter.bytes -= 1;
  store.add(whole, table);
  EXPECT_EQ(store.find(whole), table);
  EXPECT_EQ(store.find(shorter), nullptr);
  table.reset();
  EXPECT_EQ(store.find(whole), nullptr);
}

// The SHA-256 of a whole record in chunks is compared with nothing, so it must not decide.
TEST(TableStoreTest, LooksAtTheChunksWhereThereAreSome) {
  TableStore store;
  const auto table = std::make_shared<TableMemory>(2 * kMiB);
  const RecordInfo chunked{.sha256 = "aa", .bytes = 2 * kMiB, .crc32 = 1, .chunks = {"11", "22"}};
  store.add(chunked, table);
  EXPECT_EQ(store.find(chunked), table);
  RecordInfo other = chunked;
  other.chunks[1] = "33";
  EXPECT_EQ(store.find(other), nullptr);
  other.chunks.clear();
  EXPECT_EQ(store.find(other), nullptr);
}

}  // namespace
}  // namespace tessera
