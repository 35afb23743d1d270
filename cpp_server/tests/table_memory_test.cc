// Memory of large tables: it is aligned, shared by content, found again, used again, and goes back
// to the system.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <fstream>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "csrc/page_marks.h"
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
  SpareMemory nothing_is_kept(0s);
  TableStore store(nothing_is_kept);
  auto table = std::make_shared<TableMemory>(2 * kMiB, nothing_is_kept);
  const RecordInfo whole{.sha256 = "aa", .bytes = 2 * kMiB, .crc32 = 1, .chunks = {}};
  RecordInfo shorter = whole;
  shorter.bytes -= 1;
  store.add(whole, "file", table);
  EXPECT_EQ(store.find(whole, "file"), table);
  EXPECT_EQ(store.find(shorter, "file"), nullptr);
  table.reset();
  EXPECT_EQ(store.find(whole, "file"), nullptr);
}

RecordInfo listed(std::uint64_t bytes, const std::string& sha256) {
  return {.sha256 = sha256, .bytes = bytes, .crc32 = 1, .chunks = {}};
}

constexpr std::size_t kPage = 4096;

// As tables are: every byte counts, and some pages have zeros alone or at their beginning.
void fill_with_pages(const TableMemory& memory) {
  const auto content = memory.content();
  for (std::size_t i = 0; i < content.size(); ++i) {
    const std::size_t page = i / kPage;
    const bool zero = page % 3 == 1 || (page % 3 == 2 && i % kPage < 4000);
    content[i] = zero ? std::byte{0} : static_cast<std::byte>(i * 7 % 255 + 1);
  }
}

class KeptTableTest : public testing::Test {
 protected:
  static constexpr std::uint64_t kBytes = 9 * kMiB + 3 * 4096 + 3;

  // Lets go of a table that was compared with kRecord; its content.
  std::vector<std::byte> leave() {
    const auto table = std::make_shared<TableMemory>(kBytes, spare_);
    fill_with_pages(*table);
    store_.add(kRecord, "file", table);
    place_ = table->content();
    return {place_.begin(), place_.end()};
  }

  // As the kernel does where it needs memory.
  void take_page(std::size_t page) {
    ASSERT_EQ(::madvise(place_.data() + page * kPage, kPage, MADV_DONTNEED), 0);
  }

  const RecordInfo kRecord = listed(kBytes, "aa");
  SpareMemory spare_;
  TableStore store_{spare_};
  std::span<std::byte> place_;
};

TEST_F(KeptTableTest, IsFoundByItsContentAsItWas) {
  const auto content = leave();
  const std::uint64_t lazily_free = lazily_free_bytes();
  for (int times = 0; times < 3; ++times) {
    EXPECT_EQ(store_.find(listed(kBytes, "bb"), "file"), nullptr);
    const auto table = store_.find(kRecord, "file");
    ASSERT_NE(table, nullptr);
    EXPECT_EQ(store_.find(kRecord, "file"), table);
    EXPECT_EQ(table->content().data(), place_.data());
    EXPECT_TRUE(std::ranges::equal(table->content(), content));
    EXPECT_LT(lazily_free_bytes(), lazily_free - kBytes / 8 * 7);  // it is in use again
  }
}

TEST_F(KeptTableTest, IsNotFoundWhereTheSystemHasTakenAPage) {
  for (const std::size_t page : {std::size_t{0}, std::size_t{2}, kBytes / kPage}) {
    leave();
    take_page(page);
    EXPECT_EQ(store_.find(kRecord, "file"), nullptr);
    EXPECT_EQ(store_.find(kRecord, "file"), nullptr);
    const TableMemory next(kBytes, spare_);
    EXPECT_EQ(next.content().data(), place_.data());  // its memory is kept all the same
  }
}

TEST_F(KeptTableTest, IsFoundWhereThePageThatTheSystemHasTakenHadZerosAlone) {
  const auto content = leave();
  take_page(1);
  take_page(4);
  const auto table = store_.find(kRecord, "file");
  ASSERT_NE(table, nullptr);
  EXPECT_TRUE(std::ranges::equal(table->content(), content));
}

TEST_F(KeptTableTest, IsNotFoundOnceItsMemoryIsAnotherTables) {
  leave();
  {
    const TableMemory next(kBytes, spare_);
    EXPECT_EQ(store_.find(kRecord, "file"), nullptr);
  }
  EXPECT_EQ(store_.find(kRecord, "file"),
            nullptr);  // what was not compared is not known afterwards
}

TEST_F(KeptTableTest, IsNotFoundForAnotherFileUnlessSomebodyUsesIt) {
  leave();
  EXPECT_EQ(store_.find(kRecord, "file that was written to"), nullptr);
  const auto table = store_.find(kRecord, "file");
  ASSERT_NE(table, nullptr);
  EXPECT_EQ(store_.find(kRecord, "file that was written to"), table);
}

// It declines where it cannot, or takes some of the pages that were left to it.
TEST_F(KeptTableTest, IsWholeOrNotFoundWhereTheKernelIsToTakeIt) {
  const auto content = leave();
  ::madvise(place_.data(), place_.size() / kPage * kPage, MADV_PAGEOUT);
  const auto table = store_.find(kRecord, "file");
  if (table == nullptr) return;
  EXPECT_TRUE(std::ranges::equal(table->content(), content));
}

TEST_F(KeptTableTest, StaysWhatItIsOnceItIsFound) {
  const auto content = leave();
  const auto table = store_.find(kRecord, "file");
  ASSERT_NE(table, nullptr);
  // The kernel takes pages that were left to it, and those alone; where there is no swap it
  // declines.
  ::madvise(place_.data(), place_.size() / kPage * kPage, MADV_PAGEOUT);
  EXPECT_TRUE(std::ranges::equal(table->content(), content));
}

// Tables of a version that is kept: lent to the system as a whole.
class LentTablesTest : public KeptTableTest {
 protected:
  TableStore::Tables make() {
    TableStore::Tables tables;
    for (const char* sha256 : {"aa", "bb"}) {
      tables.push_back(store_.make(kBytes));
      fill_with_pages(*tables.back());
      store_.add(listed(kBytes, sha256), "file", tables.back());
    }
    place_ = tables.front()->content();
    content_.assign(place_.begin(), place_.end());
    return tables;
  }

  std::vector<std::byte> content_;
};

TEST_F(LentTablesTest, AreTheSystemsMeanwhileAndNobodyElses) {
  const TableStore::Tables tables = make();
  const std::uint64_t before = lazily_free_bytes();
  for (int times = 0; times < 3; ++times) {
    ASSERT_TRUE(store_.lend(tables));
    EXPECT_GE(lazily_free_bytes(), before + 2 * kBytes / 8 * 7);
    EXPECT_EQ(store_.find(kRecord, "file"), nullptr);
    EXPECT_NE(store_.make(kBytes)->content().data(), place_.data());
    ASSERT_TRUE(store_.take_back(tables));
    EXPECT_LT(lazily_free_bytes(), before + 2 * kBytes / 8);
    EXPECT_TRUE(std::ranges::equal(tables[0]->content(), content_));
    EXPECT_TRUE(std::ranges::equal(tables[1]->content(), content_));
    EXPECT_EQ(store_.find(kRecord, "another file"), tables[0]);
  }
}

TEST_F(LentTablesTest, AreNotTakenBackWhereTheSystemHasTakenAPageOfOne) {
  TableStore::Tables tables = make();
  ASSERT_TRUE(store_.lend(tables));
  take_page(2);
  EXPECT_FALSE(store_.take_back(tables));
  EXPECT_EQ(store_.find(kRecord, "file"), nullptr);
  tables.clear();
  // What was whole is kept with its content, the other one's memory alone.
  EXPECT_EQ(store_.find(kRecord, "file"), nullptr);
  EXPECT_NE(store_.find(listed(kBytes, "bb"), "file"), nullptr);
  EXPECT_EQ(store_.make(kBytes)->content().data(), place_.data());
}

TEST_F(LentTablesTest, AreNotLentWhileOthersUseOne) {
  const TableStore::Tables tables = make();
  const std::uint64_t before = lazily_free_bytes();
  auto other = store_.find(kRecord, "another file");
  ASSERT_NE(other, nullptr);
  EXPECT_FALSE(store_.lend(tables));
  EXPECT_LT(lazily_free_bytes(), before + kBytes / 8);
  EXPECT_EQ(store_.find(kRecord, "file"), other);
  other.reset();
  EXPECT_TRUE(store_.lend(tables));
}

TEST_F(LentTablesTest, AreFoundByWhoHasTheLastOfThemOnce) {
  TableStore::Tables tables = make();
  const auto other = store_.find(kRecord, "another file");
  tables.clear();  // who read it lets go of it
  EXPECT_EQ(store_.find(kRecord, "file"), other);
  EXPECT_TRUE(store_.lend({other}));
  EXPECT_TRUE(store_.take_back({other}));
}

TEST_F(LentTablesTest, AreNotLentWithoutAContent) {
  const TableStore::Tables tables{store_.make(kBytes)};
  EXPECT_FALSE(store_.lend(tables));
}

TEST_F(LentTablesTest, GoBackToTheSystemWhereTheyAreToBeKeptNoMore) {
  TableStore::Tables tables = make();
  const std::uint64_t before = lazily_free_bytes();
  ASSERT_TRUE(store_.lend(tables));
  for (const auto& table : tables) table->keep_no_more();
  EXPECT_GE(lazily_free_bytes(), before + 2 * kBytes / 8 * 7);
  tables.clear();  // what is kept is lazily free, too
  EXPECT_LT(lazily_free_bytes(), before + kBytes / 8);
}

TEST_F(LentTablesTest, AreFoundAndLeftByThreadsAtOnce) {
  TableStore::Tables tables = make();
  std::vector<std::jthread> threads;
  threads.reserve(3);
  for (int thread = 0; thread < 3; ++thread) {
    threads.emplace_back([this] {
      for (int i = 0; i < 200; ++i) {
        const auto found = store_.find(kRecord, "file");
        if (found != nullptr) {
          EXPECT_EQ(found->content()[0], content_[0]);
        }
      }
    });
  }
  for (int i = 0; i < 20; ++i) {
    if (store_.lend(tables)) {
      EXPECT_TRUE(store_.take_back(tables));
    }
  }
}

TEST(PageMarksTest, FindEachPageThatIsGoneWhereverItsFirstByteIs) {
  constexpr std::size_t kPages = 64;
  SpareMemory spare;
  const TableMemory memory(kPages * kPage + 1, spare);
  const auto content = memory.content();
  for (std::size_t page = 0; page < kPages; ++page) {
    content[page * kPage + page * 65 % kPage] = std::byte{1};
  }
  content.back() = std::byte{9};  // a page of one byte
  const std::vector<std::byte> before(content.begin(), content.end());
  const std::vector<std::uint16_t> marks = page_marks(content);
  EXPECT_TRUE(take_back_pages(content, marks));
  EXPECT_TRUE(std::ranges::equal(content, before));
  for (std::size_t page = 0; page <= kPages; ++page) {
    std::byte* const begin = content.data() + page * kPage;
    ASSERT_EQ(::madvise(begin, kPage, MADV_DONTNEED), 0);
    EXPECT_FALSE(take_back_pages(content, marks)) << page;
    std::ranges::copy(before, content.begin());
  }
  EXPECT_FALSE(take_back_pages(content.first(kPages * kPage - kPage), marks));
}

// The SHA-256 of a whole record in chunks is compared with nothing, so it must not decide.
TEST(TableStoreTest, LooksAtTheChunksWhereThereAreSome) {
  TableStore store;
  const auto table = std::make_shared<TableMemory>(2 * kMiB);
  const RecordInfo chunked{.sha256 = "aa", .bytes = 2 * kMiB, .crc32 = 1, .chunks = {"11", "22"}};
  store.add(chunked, "file", table);
  EXPECT_EQ(store.find(chunked, "file"), table);
  RecordInfo other = chunked;
  other.chunks[1] = "33";
  EXPECT_EQ(store.find(other, "file"), nullptr);
  other.chunks.clear();
  EXPECT_EQ(store.find(other, "file"), nullptr);
}

}  // namespace
}  // namespace tessera
