// Memory of large tables: it is aligned, shared by content, and goes back to the system.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <memory>
#include <thread>

#include "package/table_memory.h"

namespace tessera {
namespace {

constexpr std::uint64_t kMiB = 1U << 20;

std::uint64_t resident_bytes() {
  std::uint64_t pages = 0;
  std::uint64_t resident = 0;
  std::ifstream("/proc/self/statm") >> pages >> resident;
  return resident * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
}

TEST(TableMemoryTest, IsZeroAlignedAndOfItsSize) {
  const TableMemory memory(5 * kMiB + 3);
  ASSERT_EQ(memory.content().size(), 5 * kMiB + 3);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(memory.content().data()) % (2 * kMiB), 0u);
  EXPECT_TRUE(std::all_of(memory.content().begin(), memory.content().end(),
                          [](std::byte byte) { return byte == std::byte{0}; }));
  memory.content().back() = std::byte{1};
}

TEST(TableMemoryTest, GoesBackToTheSystemWhoeverLetsItGo) {
  constexpr std::uint64_t kBytes = 64 * kMiB;
  const std::uint64_t before = resident_bytes();
  std::shared_ptr<TableMemory> memory;
  std::jthread([&] {
    memory = std::make_shared<TableMemory>(kBytes);
    std::ranges::fill(memory->content(), std::byte{7});
  }).join();
  EXPECT_GE(resident_bytes(), before + kBytes / 2);
  memory.reset();
  EXPECT_LT(resident_bytes(), before + kBytes / 8);
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
