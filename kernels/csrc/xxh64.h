// XXH64, the hash that makes 64-bit ids of strings (Yann Collet; the specification is
// https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md, implementations exist in most
// languages).  The operator tessera::xxh64 and tessera-server share this file.
//
// Contract: a pure function of the bytes; any thread; no alignment is needed.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace tessera {

static_assert(std::endian::native == std::endian::little,
              "XXH64 reads its input as little-endian numbers, as they lie in memory here");

namespace xxh64_detail {

inline constexpr std::uint64_t kPrime1 = 0x9E3779B185EBCA87ULL;
inline constexpr std::uint64_t kPrime2 = 0xC2B2AE3D27D4EB4FULL;
inline constexpr std::uint64_t kPrime3 = 0x165667B19E3779F9ULL;
inline constexpr std::uint64_t kPrime4 = 0x85EBCA77C2B2AE63ULL;
inline constexpr std::uint64_t kPrime5 = 0x27D4EB2F165667C5ULL;
inline constexpr std::size_t kStripeBytes = 32;

template <typename T>
T load(const unsigned char* at) {
  T value;
  std::memcpy(&value, at, sizeof(T));
  return value;
}

inline std::uint64_t round(std::uint64_t lane, std::uint64_t input) {
  return std::rotl(lane + input * kPrime2, 31) * kPrime1;
}

inline std::uint64_t merge(std::uint64_t hash, std::uint64_t lane) {
  return (hash ^ round(0, lane)) * kPrime1 + kPrime4;
}

}  // namespace xxh64_detail

// The hash of `size` bytes at `bytes`, which may be null where size is 0.
inline std::uint64_t xxh64(const void* bytes, std::size_t size, std::uint64_t seed = 0) {
  using namespace xxh64_detail;
  const auto* at = static_cast<const unsigned char*>(bytes);
  std::size_t left = size;
  std::uint64_t hash = seed + kPrime5;
  if (left >= kStripeBytes) {
    // Four lanes take eight bytes each of every stripe.
    std::uint64_t lanes[4] = {seed + kPrime1 + kPrime2, seed + kPrime2, seed, seed - kPrime1};
    for (; left >= kStripeBytes; at += kStripeBytes, left -= kStripeBytes) {
      for (int lane = 0; lane < 4; ++lane) {
        lanes[lane] = round(lanes[lane], load<std::uint64_t>(at + 8 * lane));
      }
    }
    hash = std::rotl(lanes[0], 1) + std::rotl(lanes[1], 7) + std::rotl(lanes[2], 12) +
           std::rotl(lanes[3], 18);
    for (const std::uint64_t lane : lanes) hash = merge(hash, lane);
  }
  hash += size;
  for (; left >= 8; at += 8, left -= 8) {
    hash = std::rotl(hash ^ round(0, load<std::uint64_t>(at)), 27) * kPrime1 + kPrime4;
  }
  if (left >= 4) {
    hash = std::rotl(hash ^ load<std::uint32_t>(at) * kPrime1, 23) * kPrime2 + kPrime3;
    at += 4;
    left -= 4;
  }
  for (; left > 0; ++at, --left) hash = std::rotl(hash ^ *at * kPrime5, 11) * kPrime1;
  hash = (hash ^ (hash >> 33)) * kPrime2;
  hash = (hash ^ (hash >> 29)) * kPrime3;
  return hash ^ (hash >> 32);
}

}  // namespace tessera
