// Packages of versions that nobody uses any more, kept for when these come again.
#include "model/kept_packages.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "echo_model.h"
#include "package/package_file.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
using namespace std::chrono_literals;

constexpr std::uint64_t kBytes = 3U << 20;

class KeptPackagesTest : public testing::Test {
 protected:
  KeptPackagesTest() {
    folder_ = fs::temp_directory_path() / ("kept_packages_test." + std::to_string(::getpid()));
    fs::create_directories(folder_);
    write("a");
  }
  ~KeptPackagesTest() override { fs::remove_all(folder_); }

  std::string path(const std::string& name) const { return folder_ / name; }
  void write(const std::string& name) const { std::ofstream(path(name)) << "package " << name; }

  LoadedPackage loaded(const std::string& name) {
    LoadedPackage package = test::echo_package();
    package.path = path(name);
    const std::string file = PackageFile(path(name)).identity();
    const RecordInfo record{.sha256 = name, .bytes = kBytes, .crc32 = 1, .chunks = {}};
    const auto table = store_.make(kBytes);
    std::ranges::fill(table->content(), std::byte{5});
    store_.add(record, file, table);
    package.origin = {.file = file, .tables = {table}, .other_bytes = 100};
    while (package.file_hash->known().empty()) std::this_thread::sleep_for(1ms);
    return package;
  }

  fs::path folder_;
  SpareMemory spare_;
  TableStore store_{spare_};
};

TEST_F(KeptPackagesTest, ComeBackOnceWithTheirTables) {
  KeptPackages kept(store_);
  LoadedPackage package = loaded("a");
  const Runner* const runner = package.runner.get();
  for (int times = 0; times < 2; ++times) {
    kept.keep(std::move(package));
    std::optional<LoadedPackage> found = kept.take(path("a"));
    ASSERT_TRUE(found.has_value());
    package = std::move(*found);
    EXPECT_EQ(package.runner.get(), runner);
    EXPECT_GT(package.load_time, Duration::zero());
    const auto content = package.origin->tables[0]->content();
    EXPECT_TRUE(std::ranges::all_of(content, [](std::byte byte) { return byte == std::byte{5}; }));
    EXPECT_FALSE(kept.take(path("a")).has_value());
  }
}

TEST_F(KeptPackagesTest, ComeBackForTheirFileUnderAnotherName) {
  KeptPackages kept(store_);
  fs::create_hard_link(path("a"), path("b"));
  kept.keep(loaded("a"));
  std::optional<LoadedPackage> found = kept.take(path("b"));
  ASSERT_TRUE(found.has_value());
  EXPECT_EQ(found->path, path("b"));
}

TEST_F(KeptPackagesTest, AreNotThereForAFileThatWasReplacedWrittenToOrHasGone) {
  KeptPackages kept(store_);
  write("b");
  kept.keep(loaded("a"));
  EXPECT_FALSE(kept.take(path("b")).has_value());
  fs::rename(path("b"), path("a"));
  EXPECT_FALSE(kept.take(path("a")).has_value());
  kept.keep(loaded("a"));
  std::ofstream(path("a"), std::ios::app) << "more";
  EXPECT_FALSE(kept.take(path("a")).has_value());
  kept.keep(loaded("a"));
  fs::remove(path("a"));
  EXPECT_FALSE(kept.take(path("a")).has_value());
}

TEST_F(KeptPackagesTest, AreNotKeptWithoutAnOriginOrWithMuchBesideTheirTables) {
  KeptPackages kept(store_);
  LoadedPackage package = loaded("a");
  package.origin->other_bytes = KeptPackages::kMostOtherBytes + 1;
  kept.keep(std::move(package));
  EXPECT_FALSE(kept.take(path("a")).has_value());
  package = loaded("a");
  package.origin.reset();
  kept.keep(std::move(package));
  EXPECT_FALSE(kept.take(path("a")).has_value());
}

TEST_F(KeptPackagesTest, AreNotKeptWhileTheirFileIsHashed) {
  KeptPackages kept(store_);
  LoadedPackage package = loaded("a");
  package.file_hash = std::make_unique<FileHash>([](const std::stop_token& stop) {
    while (!stop.stop_requested()) std::this_thread::sleep_for(1ms);
    return std::string();
  });
  kept.keep(std::move(package));
  EXPECT_FALSE(kept.take(path("a")).has_value());
}

TEST_F(KeptPackagesTest, GiveTheirTablesToTheNextOnesWhereAnotherIsLoaded) {
  KeptPackages kept(store_);
  LoadedPackage package = loaded("a");
  const std::byte* const place = package.origin->tables[0]->content().data();
  kept.keep(std::move(package));
  kept.drop();
  EXPECT_FALSE(kept.take(path("a")).has_value());
  EXPECT_EQ(store_.make(kBytes)->content().data(), place);
}

TEST_F(KeptPackagesTest, AreFew) {
  KeptPackages kept(store_);
  for (std::size_t i = 0; i <= KeptPackages::kMost; ++i) {
    const std::string name = "p" + std::to_string(i);
    write(name);
    kept.keep(loaded(name));
  }
  EXPECT_FALSE(kept.take(path("p0")).has_value());
  for (std::size_t i = 1; i <= KeptPackages::kMost; ++i) {
    EXPECT_TRUE(kept.take(path("p" + std::to_string(i))).has_value());
  }
}

TEST_F(KeptPackagesTest, AreGoneAfterAWhileWithTheMemoryOfTheirTables) {
  KeptPackages kept(store_, 50ms);
  LoadedPackage package = loaded("a");
  const std::weak_ptr<TableMemory> table = package.origin->tables[0];
  kept.keep(std::move(package));
  for (int i = 0; i < 10'000 && !table.expired(); ++i) std::this_thread::sleep_for(1ms);
  EXPECT_TRUE(table.expired());
  EXPECT_FALSE(kept.take(path("a")).has_value());
  EXPECT_EQ(spare_.take(6U << 20).at, nullptr);  // what such a table has mapped
}

}  // namespace
}  // namespace tessera
