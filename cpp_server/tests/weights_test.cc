// Records found in a module that torch has opened, and changed there: on the host, and by the way
// that GPUs take.
#include <ATen/ops/arange.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>
#include <caffe2/serialize/inline_container.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <torch/csrc/jit/ir/ir.h>
#include <torch/csrc/jit/serialization/import.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <random>
#include <span>
#include <sstream>
#include <string>

#include "model/device_copy.h"
#include "model/device_weights.h"
#include "model/laid_rows.h"
#include "model/operator_libraries.h"
#include "model/record_places.h"
#include "model/weights.h"

namespace tessera {
namespace {

class Adapter final : public caffe2::serialize::ReadAdapterInterface {
 public:
  Adapter(std::string content, std::map<std::uint64_t, std::string> starts)
      : content_(std::move(content)), reads_(std::move(starts)) {}
  size_t size() const override { return content_.size(); }
  size_t read(uint64_t offset, void* buffer, size_t count, const char*) const override {
    const auto given = std::min<size_t>(count, content_.size() - offset);
    std::memcpy(buffer, content_.data() + offset, given);
    reads_.note(offset, buffer);
    return given;
  }
  const RecordAddresses& reads() const { return reads_.reads(); }

 private:
  const std::string content_;
  mutable RecordReads reads_;
};

// A module with three weights, two of them alike, and where it has their records.
struct Opened {
  Opened() {
    torch::jit::Module made("__torch__.Sum");
    made.register_buffer("a", at::ones({4}));
    made.register_buffer("b", at::ones({4}));
    made.register_parameter("c", at::zeros({2, 2}), /*is_buffer=*/false);
    made.define("def forward(self, x):\n  return self.a + 10 * self.b + x + self.c.sum()\n");
    std::stringstream out;
    made.save(out);
    const std::string archive = out.str();
    std::map<std::uint64_t, std::string> starts;
    std::map<std::string, std::uint64_t> bytes;
    std::stringstream in(archive);
    caffe2::serialize::PyTorchStreamReader reader(&in);
    for (const std::string& name : reader.getAllRecords()) {
      starts[reader.getRecordOffset(name)] = name;
      bytes[name] = reader.getRecordSize(name);
    }
    const auto adapter = std::make_shared<Adapter>(archive, starts);
    module = torch::jit::load(adapter, at::kCPU);
    module.eval();
    found = find_records(module, adapter->reads(), bytes);
  }

  float call() { return module.forward({at::zeros({4})}).toTensor()[0].item<float>(); }

  torch::jit::Module module;
  RecordPlaces found;
};

Patch patch_of(const std::string& record, float value, std::size_t numbers) {
  const std::vector<float> values(numbers, value);
  Patch patch;
  patch.info = {.record = record,
                .table = "",
                .stride = numbers * 4,
                .width = numbers * 4,
                .count = 1,
                .rows = "",
                .bytes = "bytes/0"};
  const auto bytes = std::as_bytes(std::span(values));
  patch.bytes.assign(bytes.begin(), bytes.end());
  return patch;
}

TEST(RecordPlacesTest, EveryRecordIsAtItsOwnAddress) {
  Opened opened;
  ASSERT_EQ(opened.found.places.size(), 3u);
  EXPECT_EQ(opened.call(), 11);
  HostWeights weights(opened.found.places);
  EXPECT_EQ(weights.bytes("data/0"), 16u);
  EXPECT_EQ(weights.bytes("data/3"), std::nullopt);
  for (int call = 0; call < 3; ++call) opened.call();  // torch's executor has made its plan
  // Each is changed alone, though two have had the same content.
  float sum = 0;
  for (const auto& [record, place] : opened.found.places) {
    std::vector<Patch> patches;
    patches.push_back(patch_of(record, 2, 4));
    const auto staged = weights.stage(std::move(patches));
    staged->swap();
    sum += opened.call() - 11;
    staged->swap();
    EXPECT_EQ(opened.call(), 11) << record;
  }
  EXPECT_EQ(sum, 1 + 10 + 8);
}

// Some rows of one table, or of all, in a record.
Patch rows_of(const std::string& record, std::mt19937& random, std::size_t rows, std::size_t width,
              bool all) {
  std::vector<std::uint32_t> chosen;
  for (std::uint32_t row = 0; row < rows; ++row) {
    if (all || random() % 3 == 0) chosen.push_back(row);
  }
  Patch patch;
  patch.info = {.record = record,
                .table = "t",
                .stride = width,
                .width = width,
                .count = chosen.size(),
                .rows = all ? "" : "rows/0",
                .bytes = "bytes/0"};
  const auto numbers = std::as_bytes(std::span(chosen));
  if (!all) patch.rows.assign(numbers.begin(), numbers.end());
  patch.bytes.resize(chosen.size() * width);
  for (std::byte& byte : patch.bytes) byte = static_cast<std::byte>(random());
  return patch;
}

TEST(HostWeightsTest, ManyCommitsAreTakenBackAtOnce) {
  constexpr std::size_t kRows = 20'000;
  std::mt19937 random(3);
  std::vector<std::byte> table(kRows * 4096);  // of several parts, for several threads
  std::vector<std::byte> dense(64);
  for (std::byte& byte : table) byte = static_cast<std::byte>(random());
  const std::vector<std::byte> before = table;
  HostWeights weights({{"data/0", table}, {"data/1", dense}});
  std::vector<std::shared_ptr<StagedPatches>> newest_first;
  std::vector<std::byte> after_first;
  for (int commit = 0; commit < 4; ++commit) {
    std::vector<Patch> patches;
    patches.push_back(rows_of("data/0", random, kRows, 4096, /*all=*/false));
    patches.push_back(rows_of("data/1", random, 16, 4, /*all=*/true));
    // Within the first one, so that their order counts.
    if (commit == 3) patches.push_back(rows_of("data/0", random, 5, 100, /*all=*/false));
    std::shared_ptr<StagedPatches> staged = weights.stage(std::move(patches));
    if (commit % 2 == 0) staged->prepare();
    staged->swap();
    staged->settle();
    if (commit == 0) {
      after_first = table;
    } else {
      newest_first.insert(newest_first.begin(), std::move(staged));
    }
    if (commit == 2) {
      EXPECT_NE(table, after_first);
      weights.take_back(newest_first);
      EXPECT_EQ(table, after_first);
      for (const auto& one : newest_first) one->settle();
      newest_first.clear();
    }
  }
  weights.take_back(newest_first);
  EXPECT_EQ(table, after_first);
  EXPECT_NE(table, before);
}

TEST(RecordPlacesTest, FollowsRecordsToTheirDevices) {
  Opened opened;
  std::vector<std::string> names;
  const DeviceWeights::Places moved = move_records(
      opened.module, opened.found.places,
      [&](const std::string& name) {
        names.push_back(name);
        return at::Device(at::kCPU);
      },
      /*rest=*/nullptr);
  EXPECT_EQ(names.size(), 3u);
  ASSERT_EQ(moved.size(), 3u);
  DeviceWeights weights(moved);
  EXPECT_EQ(weights.bytes("data/0"), 16u);
  std::vector<Patch> patches;
  for (const auto& [record, copies] : moved) {
    EXPECT_EQ(copies.size(), 1u);
    patches.push_back(patch_of(record, 3, 4));
  }
  const auto staged = weights.stage(std::move(patches));
  staged->swap();
  EXPECT_EQ(opened.call(), 3 + 30 + 12);
  staged->swap();
  EXPECT_EQ(opened.call(), 11);
}

TEST(RecordPlacesTest, KeepsATensorThatAModuleHasTwiceAsOne) {
  torch::jit::Module module("twice");
  const at::Tensor rows = at::ones({4, 2});
  module.register_buffer("first", rows);
  module.register_buffer("second", rows);
  module.register_buffer("part", rows.narrow(0, 0, 2));
  move_records(
      module, {}, [](const std::string&) { return at::Device(at::kMeta); }, /*rest=*/nullptr);
  const auto tensor = [&](const char* name) { return module.attr(name).toTensor(); };
  EXPECT_TRUE(tensor("first").is_meta());
  EXPECT_TRUE(tensor("first").is_same(tensor("second")));
  EXPECT_EQ(tensor("part").sizes(), (std::vector<std::int64_t>{2, 2}));
  EXPECT_FALSE(tensor("part").is_same(tensor("first")));
}

TEST(RecordPlacesTest, CopiesInPiecesOfAMegabyte) {
  for (const std::int64_t numbers : {std::int64_t{1} << 18, (std::int64_t{3} << 18) + 7}) {
    const at::Tensor from = at::arange(numbers, at::kFloat).view({1, numbers});
    int rests = 0;
    const at::Tensor to = copy_in_pieces(from, at::Device(at::kCPU), [&] { ++rests; });
    EXPECT_NE(to.data_ptr(), from.data_ptr());
    EXPECT_TRUE(to.equal(from));
    EXPECT_EQ(to.sizes(), from.sizes());
    EXPECT_EQ(rests, numbers == std::int64_t{1} << 18 ? 1 : 4);
  }
}

TEST(RecordPlacesTest, MovesWhatGraphsHaveAsConstants) {
  torch::jit::Module module("constants");
  module.define("def forward(self, x):\n  if bool(x.sum() > 0):\n    x = x + 1\n  return x\n");
  torch::jit::Graph& graph = *module.get_method("forward").graph();
  torch::jit::Node* const branch =
      *std::find_if(graph.nodes().begin(), graph.nodes().end(),
                    [](const torch::jit::Node* node) { return node->kind() == c10::prim::If; });
  std::vector<torch::jit::Node*> constants;
  for (torch::jit::Block* const place : {graph.block(), branch->blocks()[0]}) {
    torch::jit::WithInsertPoint at(*place->nodes().begin());
    constants.push_back(graph.insertConstant(at::ones({2}))->node());
  }
  move_constants(module, at::Device(at::kMeta));
  for (torch::jit::Node* const constant : constants) {
    EXPECT_TRUE(constant->t(c10::attr::value).is_meta());
  }
}

// Rows anywhere in a record, of two copies, written by either way: the same bytes.
TEST(DeviceWeightsTest, WritesWhatTheHostWrites) {
  std::mt19937 random{3};
  for (int round = 0; round < 50; ++round) {
    constexpr std::size_t kBytes = 4'096;
    std::vector<std::byte> host(kBytes);
    for (std::byte& byte : host) byte = static_cast<std::byte>(random());
    const std::vector<std::byte> before = host;
    const auto copy = [&] { return at::from_blob(host.data(), {kBytes}, at::kByte).clone(); };
    const std::vector<at::Tensor> copies = {copy(), copy()};
    std::vector<Patch> patches;
    for (int i = 0; i < 3; ++i) {  // they overlap
      Patch patch;
      patch.info.record = "data/0";
      patch.info.width = 1 + random() % 40;
      patch.info.stride = patch.info.width + random() % 3;
      patch.info.offset = random() % 100;
      const std::uint64_t most = (kBytes - 100) / patch.info.stride - 1;
      std::vector<std::uint32_t> rows;
      for (std::uint32_t row = 0; row < most; ++row) {
        if (random() % 3 == 0 || rows.empty()) rows.push_back(row);
      }
      if (i == 1) {
        rows.resize(most / 2);
      } else {
        patch.rows.resize(rows.size() * 4);
        std::memcpy(patch.rows.data(), rows.data(), patch.rows.size());
      }
      patch.info.count = rows.size();
      patch.bytes.resize(patch.info.count * patch.info.width);
      for (std::byte& byte : patch.bytes) byte = static_cast<std::byte>(random());
      patches.push_back(std::move(patch));
    }
    HostWeights on_host({{"data/0", std::span(host)}});
    DeviceWeights on_devices({{"data/0", copies}});
    const auto staged_on_host = on_host.stage(patches);
    const auto staged_on_devices = on_devices.stage(patches);
    const std::uint64_t held = staged_on_host->bytes();
    staged_on_host->prepare();
    staged_on_host->fetch();
    if (round % 2 == 0) staged_on_devices->prepare();
    EXPECT_EQ(host, before) << round;
    for (const at::Tensor& one : copies) {
      EXPECT_EQ(std::memcmp(one.const_data_ptr(), before.data(), kBytes), 0) << round;
    }
    // The first two write what was kept; settled, which may be after any of them, they exchange.
    const int settled = round % 3;
    for (int swap = 0; swap < 4; ++swap) {
      if (swap == settled) {
        EXPECT_GT(staged_on_host->bytes(), held);
        staged_on_host->settle();
        staged_on_devices->settle();
        EXPECT_EQ(staged_on_host->bytes(), held);
      }
      staged_on_host->swap();
      staged_on_devices->swap();
      for (const at::Tensor& one : copies) {
        EXPECT_EQ(std::memcmp(one.const_data_ptr(), host.data(), kBytes), 0) << round;
      }
      EXPECT_EQ(host == before, swap % 2 == 1);
    }
  }
}

// What is kept to go back is as large as the commit's file: its rows' numbers are there once.
TEST(DeviceWeightsTest, HoldsTheRowsThatPatchesHaveInCommonOnce) {
  const at::Tensor record = at::zeros({1'000}, at::kByte);
  DeviceWeights weights({{"data/0", {record}}});
  const std::array<std::uint32_t, 3> rows = {1, 5, 7};
  std::vector<Patch> patches;
  for (const std::size_t width : {std::size_t{8}, std::size_t{4}}) {
    Patch patch;
    patch.info = {.record = "data/0",
                  .table = "t",
                  .offset = width == 8 ? 0U : 500U,
                  .stride = width,
                  .width = width,
                  .count = rows.size(),
                  .rows = "rows/0",
                  .bytes = "bytes/0"};
    patch.rows.resize(sizeof(rows));
    std::memcpy(patch.rows.data(), rows.data(), sizeof(rows));
    patch.bytes.assign(width * rows.size(), std::byte{1});
    patches.push_back(std::move(patch));
  }
  int between = 0;
  const auto staged =
      weights.stage(std::move(patches), Weights::Beside::kBatches, [&] { ++between; });
  EXPECT_EQ(between, 3);  // one copy of the rows, one of either patch's bytes
  constexpr std::uint64_t kHeld = 3 * (8 + 4 + 4);
  EXPECT_EQ(staged->bytes(), kHeld);
  staged->prepare();
  EXPECT_GE(staged->bytes(), kHeld + 3 * (8 + 4));
  staged->swap();
  staged->settle();
  EXPECT_EQ(staged->bytes(), kHeld);
  EXPECT_EQ(record.sum().item<std::int64_t>(), 3 * (8 + 4));
  staged->swap();
  EXPECT_EQ(record.sum().item<std::int64_t>(), 0);
  EXPECT_EQ(staged->bytes(), kHeld);
}

TEST(LaidRowsTest, TheOperatorsKeepWriteAndTakeBackRows) {
  try {
    load_operator_libraries({"tessera_ops"}, library_folders({TESSERA_OPS_FOLDER}));
  } catch (const LibraryError& error) {
    GTEST_SKIP() << error.what();
  }
  const LayRows lay_rows = lay_rows_by_operators();
  ASSERT_NE(lay_rows, nullptr);
  std::vector<std::byte> record(4'000, std::byte{1});
  const std::array<std::uint32_t, 3> rows = {0, 3, 399};
  const auto commit = [&] {
    Patch patch;
    patch.info = {.record = "data/0",
                  .table = "t",
                  .stride = 10,
                  .width = 8,
                  .count = rows.size(),
                  .rows = "rows/0",
                  .bytes = "bytes/0"};
    patch.rows.resize(sizeof(rows));
    std::memcpy(patch.rows.data(), rows.data(), sizeof(rows));
    patch.bytes.assign(8 * rows.size(), std::byte{2});
    std::vector<Patch> patches;
    patches.push_back(std::move(patch));
    return patches;
  };
  const std::vector<std::byte> before = record;
  std::vector<std::byte> after = record;
  for (const std::uint32_t row : rows) std::fill_n(after.begin() + 10 * row, 8, std::byte{2});
  HostWeights weights({{"data/0", record}}, lay_rows);
  const auto staged = weights.stage(commit(), Weights::Beside::kBatches, [] {});
  ASSERT_TRUE(staged->unfinished());
  staged->prepare();
  staged->swap();
  EXPECT_EQ(record, before);
  staged->swap();  // taken back
  EXPECT_EQ(record, before);
  staged->swap();
  while (staged->finish()) {
  }
  EXPECT_EQ(record, after);
  staged->settle();
  staged->swap();
  EXPECT_EQ(record, before);
  staged->swap();
  EXPECT_EQ(record, after);
}

TEST(HostWeightsTest, PreparationWritesToThePagesOfRows) {
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  void* const memory =
      ::mmap(nullptr, 8 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  ASSERT_NE(memory, MAP_FAILED);
  const std::span<std::byte> record(static_cast<std::byte*>(memory), 8 * page);
  // Reading makes each page the system's one page of zeros, which cannot be written to.
  EXPECT_TRUE(
      std::all_of(record.begin(), record.end(), [](std::byte one) { return one == std::byte{0}; }));
  HostWeights weights({{"data/0", record}});
  const std::array<std::uint32_t, 3> rows = {0, 3, 7};
  Patch patch;
  patch.info = {.record = "data/0",
                .table = "",
                .stride = page,
                .width = 100,
                .count = rows.size(),
                .rows = "rows/0",
                .bytes = "bytes/0"};
  patch.rows.resize(sizeof(rows));
  std::memcpy(patch.rows.data(), rows.data(), sizeof(rows));
  patch.bytes.assign(100 * rows.size(), std::byte{1});
  std::vector<Patch> patches;
  patches.push_back(std::move(patch));
  const auto staged = weights.stage(std::move(patches));
  const auto faults = [] {
    rusage usage{};
    ::getrusage(RUSAGE_THREAD, &usage);
    return usage.ru_minflt;
  };
  const auto first = faults();
  staged->prepare();
  EXPECT_GE(faults() - first, 3);
  const auto second = faults();
  staged->swap();
  EXPECT_EQ(faults(), second);
  ::munmap(memory, 8 * page);
}

}  // namespace
}  // namespace tessera
