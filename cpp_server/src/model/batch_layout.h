// Where a batch's arrays lie in one piece of memory, so that one copy moves a whole batch.
//
// Contract: plain values; any thread; nothing blocks.
#pragma once

#include <cstddef>
#include <cstdint>

#include "model/runner.h"
#include "package/schema.h"

namespace tessera {

class BatchLayout {
 public:
  // Room for `rows` rows of `schema`'s features with up to so many ids of each group.
  BatchLayout(const InputSchema& schema, std::int64_t rows, std::int64_t plain_ids,
              std::int64_t scored_ids, bool narrow);

  // Room for a batch of `shape` and `padding` rows more; its features may share rows.
  BatchLayout(const InputSchema& schema, const BatchShape& shape, std::int64_t padding,
              bool narrow);

  std::size_t bytes() const { return bytes_; }

  // The batch of `shape`, which must fit, over `memory` of at least bytes() bytes that begins at
  // a multiple of kAlignment.
  HostBatch over(std::byte* memory, const BatchShape& shape) const;

  // Where each array begins, in the order of the package's `forward`.
  struct Offsets {
    std::size_t dense = 0;
    std::size_t plain_lengths = 0;
    std::size_t plain_values = 0;
    std::size_t scored_lengths = 0;
    std::size_t scored_values = 0;
    std::size_t scored_weights = 0;
    std::size_t shared = 0;  // of a batch with shared rows alone, as the next
    std::size_t row_index = 0;
  };
  const Offsets& offsets() const { return offsets_; }

  // Bytes from the beginning to the end of what a batch of `shape` uses.
  std::size_t used(const BatchShape& shape) const;

  static constexpr std::size_t kAlignment = 64;

 private:
  void place(std::int64_t plain_ids, std::int64_t scored_ids);

  std::int64_t rows_;
  std::int64_t dense_features_;
  std::int64_t plain_features_;
  std::int64_t scored_features_;
  std::int64_t plain_bags_;
  bool shared_ = false;
  bool narrow_;
  Offsets offsets_;
  std::size_t bytes_ = 0;
};

}  // namespace tessera
