// Which patches of a commit are laid over their tables, and what swaps do with these: a list of
// what was asked for stands in the place of the operators.
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "model/weights.h"

namespace tessera {
namespace {

constexpr std::size_t kWidth = 4;

// What was laid, and what was asked of it since.
struct Asked {
  std::vector<std::uint64_t> offsets;  // of the patches
  std::vector<std::string> calls;
  int pieces = 2;  // of keep and of write, each
  bool there = false;
};

class ListedRows final : public LaidRows {
 public:
  ListedRows(Asked& asked, std::span<const LaidPatch> patches)
      : asked_(asked), patches_(patches.begin(), patches.end()) {
    for (const LaidPatch& one : patches) asked.offsets.push_back(one.patch->info.offset);
    asked.there = true;
  }
  ~ListedRows() override { asked_.there = false; }
  ListedRows(const ListedRows&) = delete;
  ListedRows& operator=(const ListedRows&) = delete;

  bool keep() override {
    if (kept_ == asked_.pieces) return false;
    asked_.calls.emplace_back("keep");
    return ++kept_ < asked_.pieces;
  }
  void show() override { asked_.calls.emplace_back("show"); }
  void take_back() override { asked_.calls.emplace_back("take back"); }
  bool write() override {
    asked_.calls.emplace_back("write");
    return ++written_ < asked_.pieces;
  }

 private:
  Asked& asked_;
  std::vector<LaidPatch> patches_;
  int kept_ = 0;
  int written_ = 0;
};

// Rows `rows` of a table from `offset` on, one every `stride` bytes; without numbers: `rows.size()`
// from the first one on.
Patch patch_of(std::uint64_t offset, const std::vector<std::uint32_t>& rows, bool numbered = true,
               std::uint64_t stride = kWidth) {
  Patch patch;
  patch.info = {.record = "data/0",
                .table = "t",
                .offset = offset,
                .stride = stride,
                .width = kWidth,
                .count = rows.size(),
                .rows = numbered ? "rows/0" : "",
                .bytes = "bytes/0"};
  if (numbered) {
    patch.rows.resize(rows.size() * sizeof(std::uint32_t));
    std::memcpy(patch.rows.data(), rows.data(), patch.rows.size());
  }
  patch.bytes.assign(rows.size() * kWidth, std::byte{7});
  return patch;
}

struct LaidPatchesTest : testing::Test {
  std::unique_ptr<StagedPatches> stage(std::vector<Patch> patches,
                                       Weights::Beside beside = Weights::Beside::kBatches) {
    return weights.stage(std::move(patches), beside, [] {});
  }

  std::vector<std::byte> record = std::vector<std::byte>(400);
  Asked asked;
  HostWeights weights{{{"data/0", record}}, [this](std::span<const LaidPatch> patches) {
                        return std::make_unique<ListedRows>(asked, patches);
                      }};
};

std::vector<Patch> both(Patch first, Patch second) {
  std::vector<Patch> patches;
  patches.push_back(std::move(first));
  patches.push_back(std::move(second));
  return patches;
}

TEST_F(LaidPatchesTest, RowsOfTablesApartFromEachOtherAreLaid) {
  const auto staged = stage(both(patch_of(200, {1, 3}), patch_of(0, {0, 9})));
  EXPECT_EQ(asked.offsets, (std::vector<std::uint64_t>{200, 0}));
  EXPECT_TRUE(staged->unfinished());
}

TEST_F(LaidPatchesTest, WhatHasNoNumbersIsExchangedBesideThem) {
  const auto staged = stage(both(patch_of(0, {0, 9}), patch_of(200, {0}, /*numbered=*/false)));
  EXPECT_EQ(asked.offsets, (std::vector<std::uint64_t>{0}));
  staged->prepare();
  staged->swap();
  EXPECT_EQ(record[200], std::byte{7});
  EXPECT_EQ(record[0], std::byte{0});  // lookups read the new row elsewhere
  staged->swap();
  EXPECT_EQ(record[200], std::byte{0});
  EXPECT_EQ(asked.calls, (std::vector<std::string>{"keep", "keep", "show", "take back"}));
}

TEST_F(LaidPatchesTest, NoneIsLaidInARecordWhereOneLiesWithinAnother) {
  const auto staged = stage(both(patch_of(0, {0, 9}), patch_of(20, {0})));
  EXPECT_TRUE(asked.offsets.empty());
  EXPECT_FALSE(staged->unfinished());
  staged->swap();
  EXPECT_EQ(record[0], std::byte{7});
  EXPECT_EQ(record[20], std::byte{7});
}

TEST_F(LaidPatchesTest, NoneIsLaidWhereNobodyWaits) {
  const auto staged =
      stage(both(patch_of(0, {0, 9}), patch_of(200, {1})), Weights::Beside::kNothing);
  EXPECT_TRUE(asked.offsets.empty());
  EXPECT_FALSE(staged->unfinished());
}

TEST_F(LaidPatchesTest, RowsOfNoTableAndRowsWithLargeGapsAreNotLaid) {
  Patch nameless = patch_of(0, {0, 9});
  nameless.info.table = "";
  stage(both(std::move(nameless), patch_of(200, {0, 3}, /*numbered=*/true, 2 * kWidth)));
  EXPECT_TRUE(asked.offsets.empty());
}

TEST_F(LaidPatchesTest, WhatWasNotPreparedIsKeptByTheSwap) {
  const auto staged = stage(both(patch_of(0, {0}), patch_of(200, {1})));
  staged->swap();
  EXPECT_EQ(asked.calls, (std::vector<std::string>{"keep", "keep", "show"}));
}

TEST_F(LaidPatchesTest, OnceFinishedTheyAreUndoneAsOthersAre) {
  const auto staged = stage(both(patch_of(0, {0, 9}), patch_of(200, {1})));
  const std::uint64_t bytes = staged->bytes();
  EXPECT_EQ(bytes, 3 * (kWidth + sizeof(std::uint32_t)));
  staged->prepare();
  staged->swap();
  EXPECT_TRUE(staged->finish());
  EXPECT_FALSE(staged->finish());
  staged->settle();
  EXPECT_FALSE(asked.there);
  EXPECT_FALSE(staged->unfinished());
  EXPECT_EQ(staged->bytes(), bytes);
  asked.calls.clear();
  staged->swap();  // what the list has not written are the patches' own bytes
  EXPECT_EQ(record[0], std::byte{7});
  EXPECT_EQ(record[204], std::byte{7});
  staged->swap();
  EXPECT_EQ(record[0], std::byte{0});
  EXPECT_TRUE(asked.calls.empty());
}

}  // namespace
}  // namespace tessera
