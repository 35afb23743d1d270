#include "http2/read_size.h"

#include <gtest/gtest.h>

namespace tessera::http2 {
namespace {

constexpr std::size_t kMost = 256 * 1024;
constexpr Duration kShort = kLongHearing / 10;
constexpr Duration kLong = 10 * kLongHearing;

TEST(ReadSize, HalvesWhatTookLong) {
  EXPECT_EQ(next_read_bytes(kMost, 200'000, kLong, kMost), 100'000U);
  EXPECT_EQ(next_read_bytes(kMost, 40'000, kLong, kMost), 20'000U);
}

TEST(ReadSize, NeverFallsBelowTheLeast) {
  EXPECT_EQ(next_read_bytes(kMost, 20'000, kLong, kMost), kLeastReadBytes);
  EXPECT_EQ(next_read_bytes(kLeastReadBytes, 9, kLong, kMost), kLeastReadBytes);
}

TEST(ReadSize, GrowsAgainUpToTheMost) {
  EXPECT_EQ(next_read_bytes(kLeastReadBytes, 9, kShort, kMost), 2 * kLeastReadBytes);
  EXPECT_EQ(next_read_bytes(200'000, 200'000, kShort, kMost), kMost);
  EXPECT_EQ(next_read_bytes(kMost, kMost, kLongHearing, kMost), kMost);
}

}  // namespace
}  // namespace tessera::http2
