// Tables that go from a package's file to devices, piece by piece. Where there are GPUs, to these,
// too.
#include <ATen/Context.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "model/device_tables.h"
#include "package/package_error.h"
#include "package/sha256.h"
#include "zip_writer.h"

namespace tessera {
namespace {

std::string digest(const std::string& content) {
  Sha256 sha;
  sha.update(std::as_bytes(std::span(content)));
  return sha.hex();
}

std::string random_text(std::size_t bytes) {
  std::independent_bits_engine<std::mt19937, 32, std::uint32_t> random(
      static_cast<std::uint32_t>(bytes));
  std::string made(bytes, '\0');
  for (std::size_t i = 0; i < bytes; i += 4) {
    const std::uint32_t word = random();
    for (std::size_t k = i; k < std::min(i + 4, bytes); ++k) {
      made[k] = static_cast<char>(word >> (8 * (k - i)));
    }
  }
  return made;
}

std::string text_of(const at::Tensor& tensor) {
  const at::Tensor here = tensor.cpu();
  return {static_cast<const char*>(here.const_data_ptr()), here.nbytes()};
}

// The CPU, and every GPU.
std::vector<at::Device> all_devices() {
  std::vector<at::Device> devices = {at::Device(at::kCPU)};
  const at::DeviceIndex gpus = at::hasCUDA() ? at::detail::getCUDAHooks().deviceCount() : 0;
  for (at::DeviceIndex i = 0; i < gpus; ++i) devices.emplace_back(at::kCUDA, i);
  return devices;
}

struct DeviceTablesTest : testing::Test {
  // Sizes around those of a piece, of a copy and of a chunk.
  DeviceTablesTest() {
    for (const std::uint64_t bytes :
         {std::uint64_t{1}, kPieceBytes, kPieceBytes + 1, std::uint64_t{1 << 20},
          std::uint64_t{(1 << 20) + 1}, kChunkBytes, kChunkBytes + 1, 2 * kChunkBytes + 70'000}) {
      contents.emplace("data/" + std::to_string(contents.size()), random_text(bytes));
    }
    std::vector<test::ZipEntry> entries;
    for (const auto& [name, content] : contents) entries.push_back({"model/" + name, content});
    entries.push_back({"model/" + std::string(kManifestRecord), "{}"});
    zipped = test::zip(entries);
    test::write_file(path, zipped);
  }
  ~DeviceTablesTest() override { std::remove(path.c_str()); }

  Listed listed(const Records& records) const {
    Listed all;
    for (const auto& [name, content] : contents) {
      RecordInfo info{digest(content), content.size(), records.all().at(name).crc32, {}};
      if (chunk_count(content.size()) > 0) {
        for (std::size_t at = 0; at < content.size(); at += kChunkBytes) {
          info.chunks.push_back(digest(content.substr(at, kChunkBytes)));
        }
      }
      all.emplace(name, info);
    }
    return all;
  }

  std::map<std::string, std::string> contents;
  std::string zipped;
  const std::string path = testing::TempDir() + "tessera_device_tables_test_" +
                           std::to_string(::getpid()) + "_" +
                           testing::UnitTest::GetInstance()->current_test_info()->name();
};

TEST_F(DeviceTablesTest, ReadsEachTableToItsDevices) {
  const PackageFile file(path);
  const Records records(file);
  const Listed all = listed(records);
  std::map<std::string, std::set<std::size_t>> shards;
  std::size_t number = 0;
  std::uint64_t bytes = 0;
  for (const auto& [name, content] : contents) {
    if (name == "data/2") continue;  // is none of the tables
    shards[name] = {number++ % 2};
    bytes += content.size();
  }
  shards["data/7"] = {0, 1};
  const std::vector<at::Device> devices = all_devices();
  const at::Device last = devices.back();
  for (const unsigned threads : {1U, 8U}) {
    for (const bool when_idle : {false, true}) {
      std::atomic<std::uint64_t> compared = 0;
      std::atomic<int> makers = 0;
      std::atomic<int> pauses = 0;
      // Two copies: one with its shards on the first and on the last device, one on the last alone.
      DeviceTables tables(records, all, {{devices.front(), last}, {last, last}},
                          {.threads = threads,
                           .when_idle = when_idle,
                           .progress = [&](std::uint64_t more) { compared += more; },
                           .pauses =
                               [&] {
                                 ++makers;
                                 return [&] { ++pauses; };
                               }});
      tables.read(shards);
      EXPECT_EQ(compared, bytes);
      EXPECT_GE(makers, 1);
      EXPECT_LE(makers, static_cast<int>(threads));
      EXPECT_GE(pauses, static_cast<int>(bytes / kPieceBytes));
      for (const auto& [name, of] : shards) {
        EXPECT_EQ(text_of(tables.on(name, last)), contents.at(name)) << name;
        if (!of.contains(0)) continue;
        const at::Tensor& first = tables.on(name, devices.front());
        EXPECT_EQ(first.device(), devices.front());
        EXPECT_EQ(text_of(first), contents.at(name)) << name;
      }
      // What has been read is not read again.
      const void* const place = tables.on("data/7", last).const_data_ptr();
      tables.read(shards);
      EXPECT_EQ(compared, bytes);
      EXPECT_EQ(tables.on("data/7", last).const_data_ptr(), place);
    }
  }
}

TEST_F(DeviceTablesTest, SharesTablesOfTheSameContent) {
  const PackageFile file(path);
  const Records records(file);
  const Listed all = listed(records);
  const std::map<std::string, std::set<std::size_t>> shards = {{"data/5", {0}}, {"data/6", {0}}};
  for (const at::Device device : all_devices()) {
    std::uint64_t compared = 0;
    const ReadOptions options = {.progress = [&](std::uint64_t more) { compared += more; }};
    auto first =
        std::make_unique<DeviceTables>(records, all, DeviceTables::Placements{{device}}, options);
    first->read({{"data/5", {0}}});
    EXPECT_EQ(compared, contents.at("data/5").size());
    DeviceTables second(records, all, {{device}}, options);
    second.read(shards);
    EXPECT_EQ(compared, contents.at("data/5").size() + contents.at("data/6").size());
    EXPECT_EQ(second.on("data/5", device).const_data_ptr(),
              first->on("data/5", device).const_data_ptr());
    DeviceTables own(records, all, {{device}}, options, Opening::Sharing::kNo);
    own.read({{"data/5", {0}}});
    EXPECT_NE(own.on("data/5", device).const_data_ptr(),
              first->on("data/5", device).const_data_ptr());
    first.reset();
    EXPECT_EQ(text_of(second.on("data/5", device)), contents.at("data/5"));
    EXPECT_EQ(text_of(second.on("data/6", device)), contents.at("data/6"));
  }
  // Nobody has them any more.
  std::uint64_t again = 0;
  DeviceTables third(records, all, {{at::Device(at::kCPU)}},
                     {.progress = [&](std::uint64_t more) { again += more; }});
  third.read(shards);
  EXPECT_EQ(again, contents.at("data/5").size() + contents.at("data/6").size());
}

TEST_F(DeviceTablesTest, RefusesAChangedChunk) {
  const std::uint64_t size = contents.at("data/7").size();
  for (const std::uint64_t place : {std::uint64_t{0}, kChunkBytes + 5, size - 1}) {
    std::string bad = zipped;
    {
      test::write_file(path, zipped);
      const PackageFile file(path);
      const std::uint64_t at = Records(file).all().at("data/7").offset + place;
      bad[at] = static_cast<char>(bad[at] ^ 1);
    }
    test::write_file(path, bad);
    const PackageFile file(path);
    const Records records(file);
    const Listed all = listed(records);
    for (const at::Device device : all_devices()) {
      DeviceTables tables(records, all, {{device}}, {.threads = 2});
      const std::map<std::string, std::set<std::size_t>> shards = {{"data/5", {0}},
                                                                   {"data/7", {0}}};
      try {
        tables.read(shards);
        FAIL() << "a changed byte was not found";
      } catch (const PackageError& error) {
        EXPECT_NE(std::string(error.what()).find("record 'data/7' was changed: SHA-256"),
                  std::string::npos);
      }
      EXPECT_THROW(tables.on("data/5", device), std::out_of_range);
      // So it is where no shard has it, and not where it is none of the tables.
      DeviceTables unplaced(records, all, {{device}}, {});
      EXPECT_THROW(unplaced.read({{"data/5", {0}}, {"data/7", {}}}), PackageError);
      DeviceTables others(records, all, {{device}}, {});
      others.read({{"data/5", {0}}});
      EXPECT_EQ(text_of(others.on("data/5", device)), contents.at("data/5"));
    }
  }
}

}  // namespace
}  // namespace tessera
