// Many jagged requests become one batch, feature-major: all requests' ids of the first
// feature, then all of the second. Everything is copied, once, into the memory that a session
// reserved: pinned memory where a GPU computes. Ids become int64 unless the session takes int32
// and every client sent int32.
//
// Contract: a Merger is owned by one worker. It trusts the decoder's checks. Nothing blocks.
#pragma once

#include <cstddef>
#include <span>

#include "batching/buffer.h"
#include "batching/pending.h"
#include "model/runner.h"
#include "package/schema.h"

namespace tessera {

class Merger {
 public:
  explicit Merger(const InputSchema& schema);

  // One batch of the rows of `parts`, in their order, in memory of `session`; at least one part.
  HostBatch merge(std::span<const Part> parts, Session& session);

  // Bytes held for the next batch.
  std::size_t bytes() const { return begins_.bytes(); }

 private:
  // How a group is found in a request.
  struct GroupView {
    JaggedView DecodedRequest::*view = nullptr;
    std::size_t features = 0;
    std::size_t first_feature = 0;  // among a Part's id ranges
    bool weighted = false;
  };

  static std::int64_t count_ids(const GroupView& group, std::span<const Part> parts);
  void fill(const GroupView& group, std::span<const Part> parts, std::size_t padding,
            const HostGroup& merged);

  std::size_t dense_features_;
  GroupView plain_;
  GroupView scored_;
  Buffer<std::int64_t> begins_;  // [parts]: next id of each part, while merging
};

}  // namespace tessera
