// The ids that a package's vocabularies hold: which ids of a request no training row had
// (serving/FORMAT.md, "Vocabularies").
//
// Contract: never changed once made; any thread; nothing blocks.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

namespace tessera {

// Ascending keys fmix64(id ^ seed) of all ids [U], the place of each key's id among those of all
// vocabularies [U], and the seeds [V]. `owner` keeps what the spans look at.
struct VocabularyBuffers {
  std::span<const std::int64_t> keys;
  std::span<const std::int64_t> places;
  std::span<const std::int64_t> seeds;
  std::shared_ptr<const void> owner;
};

class Vocabularies {
 public:
  // `sizes[v]`: how many ids vocabulary v has.
  Vocabularies(VocabularyBuffers buffers, const std::vector<std::int64_t>& sizes);

  // Whether vocabulary `number` holds `id`; false for a number that there is none of.
  bool holds(std::size_t number, std::int64_t id) const;

 private:
  struct Part {
    std::uint64_t seed = 0;
    std::int64_t first = 0;  // the place of its first id
    std::int64_t behind = 0;
  };

  std::size_t bucket_of(std::uint64_t key) const;

  VocabularyBuffers buffers_;
  std::vector<Part> parts_;
  // Where the keys with the same highest bits begin, and behind the last of them the end: keys are
  // spread evenly, so that one or two lie between, and a search touches two lines of memory.
  std::vector<std::uint32_t> begins_;
  int shift_ = 63;
};

}  // namespace tessera
