// Bytes that are not set to zero: of every size, and large ones go back to the system.
#include "common/raw_bytes.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>

namespace tessera {
namespace {

// Whether there is memory at `place`.
bool mapped(const std::byte* place) {
  const auto page = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
  const std::uintptr_t begin = reinterpret_cast<std::uintptr_t>(place) / page * page;
  unsigned char resident = 0;
  return ::mincore(reinterpret_cast<void*>(begin), 1, &resident) == 0;
}

TEST(RawBytesTest, HoldBytesOfEverySize) {
  for (const std::size_t size : {1UL, 65535UL, 65536UL, 65537UL, 1000000UL}) {
    RawBytes bytes(size);
    std::ranges::fill(bytes, std::byte{7});
    bytes.resize(2 * size);  // moved to other memory, also from small to large
    EXPECT_EQ(
        std::count(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(size), std::byte{7}),
        static_cast<std::ptrdiff_t>(size));
    RawBytes copy = bytes;
    bytes.swap(copy);
    bytes = std::move(copy);
    EXPECT_EQ(bytes.size(), 2 * size);
  }
}

TEST(RawBytesTest, LargeOnesGoBackToTheSystemThoughSomethingBehindThemStays) {
  RawBytes large(std::size_t{1} << 20);
  const RawBytes behind(std::size_t{1} << 20);
  const std::byte* const place = large.data();
  EXPECT_TRUE(mapped(place));
  RawBytes().swap(large);
  EXPECT_FALSE(mapped(place));
}

TEST(RawBytesTest, MoreThanThereIsIsRefused) {
  EXPECT_THROW(RawBytes(std::size_t{1} << 60), std::bad_alloc);
}

}  // namespace
}  // namespace tessera
