// Regions of shared memory with clients that do as they please.
#include "request/shared_memory.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <limits>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "shared_object.h"
#include "support.h"

namespace tessera {
namespace {

using test::as_bytes;
using test::SharedObject;

constexpr std::uint64_t kHuge = std::numeric_limits<std::uint64_t>::max();

std::string text_of(const SharedRegion& region, std::uint64_t offset, std::size_t bytes) {
  std::string read(bytes, '?');
  const Status status = region.read(offset, std::as_writable_bytes(std::span(read)));
  return status.ok() ? read : status.message;
}

struct SharedMemoryTest : testing::Test {
  SharedObject object{"0123456789"};
  SharedMemory memory{{.descriptors = 3, .bytes = 20}};

  Status add(std::string name, std::uint64_t offset = 0, std::uint64_t byte_size = 10) {
    return memory.add({std::move(name), object.key(), offset, byte_size});
  }
};

TEST_F(SharedMemoryTest, ReadsAndWritesWhatIsRegistered) {
  ASSERT_TRUE(add("part", 2, 6).ok());
  const auto part = memory.find("part");
  ASSERT_NE(part, nullptr);
  EXPECT_EQ(text_of(*part, 0, 6), "234567");
  EXPECT_EQ(text_of(*part, 4, 2), "67");
  EXPECT_EQ(text_of(*part, 6, 0), "");
  ASSERT_TRUE(part->open_for_writing().ok());
  ASSERT_TRUE(part->open_for_writing().ok());
  ASSERT_TRUE(part->write(1, as_bytes("ab")).ok());
  EXPECT_EQ(object.content(), "012ab56789");
}

TEST_F(SharedMemoryTest, ARegionThatHasShrunkIsRefusedAndStaysAsItIs) {
  ASSERT_TRUE(add("region").ok());
  const auto region = memory.find("region");
  ASSERT_TRUE(region->open_for_writing().ok());
  object.resize(5);
  EXPECT_EQ(text_of(*region, 0, 5), "01234");
  EXPECT_EQ(text_of(*region, 2, 6),
            "shared memory region 'region' has shrunk: its 6 bytes from 2 on are not all there");
  EXPECT_EQ(region->write(4, as_bytes("ab")).message,
            "shared memory region 'region' has shrunk: its 2 bytes from 4 on are not all there");
  EXPECT_EQ(object.content(), "01234");
}

TEST_F(SharedMemoryTest, ARegionThatIsUnregisteredStaysWithItsUsers) {
  ASSERT_TRUE(add("region").ok());
  auto region = memory.find("region");
  object.unlink();
  memory.remove("region");
  memory.remove("region");
  EXPECT_EQ(memory.find("region"), nullptr);
  EXPECT_EQ(text_of(*region, 0, 10), "0123456789");
  ASSERT_TRUE(region->open_for_writing().ok());
  EXPECT_TRUE(region->write(0, as_bytes("x")).ok());
  EXPECT_EQ(text_of(*region, 0, 2), "x1");
}

TEST_F(SharedMemoryTest, BoundsRegionsBytesAndDescriptors) {
  ASSERT_TRUE(add("a").ok());
  EXPECT_EQ(add("a").code, Code::kAlreadyExists);
  ASSERT_TRUE(add("b", 0, 9).ok());
  const Status full = add("c", 0, 2);
  EXPECT_EQ(full.code, Code::kResourceExhausted);
  EXPECT_EQ(full.message,
            "the shared memory regions that are registered have 19 bytes (limit 20), this one has "
            "2");
  ASSERT_TRUE(add("c", 0, 1).ok());
  // A refused registration takes nothing.
  for (int i = 0; i < 5; ++i) EXPECT_EQ(add("d").code, Code::kResourceExhausted);
  EXPECT_EQ(memory.find("a")->open_for_writing().code, Code::kResourceExhausted);
  // Its bytes are given back when nobody uses it any more.
  auto used = memory.find("a");
  memory.remove("a");
  EXPECT_EQ(add("d", 0, 10).code, Code::kResourceExhausted);
  used.reset();
  ASSERT_TRUE(add("d", 0, 10).ok());
  memory.remove_all();
  std::vector<SharedRegionFacts> listed;
  EXPECT_TRUE(memory.list("", listed).ok());
  EXPECT_TRUE(listed.empty());
  for (const char* name : {"x", "y"}) ASSERT_TRUE(add(name).ok());
  EXPECT_TRUE(memory.list("y", listed).ok());
  ASSERT_EQ(listed.size(), 1u);
  EXPECT_EQ(listed[0].key, object.key());
  EXPECT_EQ(memory.list("z", listed).code, Code::kNotFound);
}

TEST_F(SharedMemoryTest, RefusesWhatDoesNotLieInTheObject) {
  const std::pair<std::uint64_t, std::uint64_t> cases[] = {
      {0, 11}, {10, 1}, {11, 1}, {kHuge, 1}, {1, kHuge}, {kHuge, kHuge}, {kHuge - 4, 10}};
  SharedMemory large{{.bytes = kHuge}};
  for (const auto& [offset, bytes] : cases) {
    const Status status = large.add({"region", object.key(), offset, bytes});
    EXPECT_EQ(status.code, Code::kInvalidArgument) << offset << ' ' << bytes;
    EXPECT_NE(status.message.find("which has 10 bytes"), std::string::npos) << status.message;
  }
  EXPECT_EQ(add("region", 0, 0).message, "byte_size is 0, expected at least 1");
}

TEST_F(SharedMemoryTest, OpensPosixSharedMemoryAlone) {
  const std::string long_name(256, 'n');
  for (const std::string key :
       {"", "/", ".", "..", "/..", "//a", "/a/b", "a/../b", "/etc/passwd", "/dev/shm/a"}) {
    const Status status = memory.add({"region", key, 0, 1});
    EXPECT_EQ(status.code, Code::kInvalidArgument) << key;
    EXPECT_NE(status.message.find("is not a name of POSIX shared memory"), std::string::npos);
  }
  EXPECT_EQ(memory.add({"region", std::string("/a\0b", 4), 0, 1}).code, Code::kInvalidArgument);
  EXPECT_EQ(memory.add({"region", "/" + long_name, 0, 1}).code, Code::kInvalidArgument);
  EXPECT_EQ(memory.add({long_name, object.key(), 0, 1}).code, Code::kInvalidArgument);
  EXPECT_EQ(memory.add({"", object.key(), 0, 1}).code, Code::kInvalidArgument);
  EXPECT_EQ(memory.add({"region", object.key() + "-absent", 0, 1}).code, Code::kNotFound);
}

// A link leads elsewhere, and the open of a FIFO would wait for its other end.
TEST_F(SharedMemoryTest, RefusesLinksAndFifos) {
  const std::string folder = "/dev/shm";
  const std::string link = object.key() + "-link";
  const std::string fifo = object.key() + "-fifo";
  if (::symlink("/etc/passwd", (folder + link).c_str()) != 0) GTEST_SKIP() << "no /dev/shm";
  const int made = ::mkfifo((folder + fifo).c_str(), 0600);
  EXPECT_EQ(memory.add({"region", link, 0, 1}).code, Code::kInvalidArgument);
  EXPECT_EQ(made, 0);
  EXPECT_EQ(memory.add({"region", fifo, 0, 1}).code, Code::kInvalidArgument);
  ::unlink((folder + link).c_str());
  ::unlink((folder + fifo).c_str());
}

TEST(SharedMemoryDescriptors, LeavesHalfOfThemToConnections) {
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  rlimit few = before;
  few.rlim_cur = std::min<rlim_t>(before.rlim_max, 100);
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &few), 0);
  EXPECT_EQ(SharedMemory::descriptors_to_be_had(1), 1);
  rlimit raised{};
  ::getrlimit(RLIMIT_NOFILE, &raised);
  EXPECT_EQ(raised.rlim_cur, std::min<rlim_t>(before.rlim_max, 101));
  const std::int64_t most = SharedMemory::descriptors_to_be_had(std::int64_t{1} << 40);
  EXPECT_LE(2 * most, static_cast<std::int64_t>(before.rlim_max));
  EXPECT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
}

}  // namespace
}  // namespace tessera
