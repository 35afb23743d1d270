#include "model/vocabularies.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <utility>

namespace tessera {
namespace {

constexpr std::uint64_t kSign = std::uint64_t{1} << 63;

// MurmurHash3's 64-bit finaliser.
std::uint64_t fmix64(std::uint64_t bits) {
  bits = (bits ^ (bits >> 33)) * 0xff51afd7ed558ccdULL;
  bits = (bits ^ (bits >> 33)) * 0xc4ceb9fe1a85ec53ULL;
  return bits ^ (bits >> 33);
}

}  // namespace

Vocabularies::Vocabularies(VocabularyBuffers buffers, const std::vector<std::int64_t>& sizes)
    : buffers_(std::move(buffers)) {
  const std::size_t count = std::min(buffers_.keys.size(), buffers_.places.size());
  if (count == 0 || count >= std::numeric_limits<std::uint32_t>::max()) return;
  std::int64_t first = 0;
  for (std::size_t v = 0; v < std::min(sizes.size(), buffers_.seeds.size()); ++v) {
    parts_.push_back({static_cast<std::uint64_t>(buffers_.seeds[v]), first, first + sizes[v]});
    first += sizes[v];
  }
  const int bits = std::max(1, static_cast<int>(std::bit_width(count)) - 1);
  shift_ = 64 - bits;
  const std::size_t buckets = std::size_t{1} << bits;
  begins_.assign(buckets + 1, static_cast<std::uint32_t>(count));
  std::size_t bucket = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const std::size_t own = bucket_of(static_cast<std::uint64_t>(buffers_.keys[i]));
    for (; bucket <= own; ++bucket) begins_[bucket] = static_cast<std::uint32_t>(i);
  }
}

// Once the sign is turned over, the order of signed numbers is that of unsigned ones.
std::size_t Vocabularies::bucket_of(std::uint64_t key) const { return (key ^ kSign) >> shift_; }

bool Vocabularies::holds(std::size_t number, std::int64_t id) const {
  if (number >= parts_.size()) return false;
  const Part& part = parts_[number];
  const std::uint64_t key = fmix64(static_cast<std::uint64_t>(id) ^ part.seed);
  const std::size_t bucket = bucket_of(key);
  for (std::size_t i = begins_[bucket]; i < begins_[bucket + 1]; ++i) {
    if (static_cast<std::uint64_t>(buffers_.keys[i]) != key) continue;
    const std::int64_t place = buffers_.places[i];
    return place >= part.first && place < part.behind;
  }
  return false;
}

}  // namespace tessera
