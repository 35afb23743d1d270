// Many jagged requests become one batch, feature-major: all requests' ids of the first
// feature, then all of the second. Everything is copied, once, into the memory that a session
// reserved: pinned memory where a GPU computes. Ids become int64 unless the session takes int32
// and every client sent int32. Where a request shares rows of features among its samples, the batch
// does: those features have the rows of all parts one after the other, and a part that shares
// nothing brings a row per sample.
//
// Contract: a Merger is owned by one worker. It trusts the decoder's checks. Nothing blocks.
#pragma once

#include <cstddef>
#include <span>

#include "batching/buffer.h"
#include "batching/pending_request.h"
#include "model/runner.h"
#include "package/schema.h"

namespace tessera {

class Merger {
 public:
  explicit Merger(const InputSchema& schema);

  // One batch of the rows of `parts`, in their order, in memory of `session`; at least one part.
  // Parts that share rows share those of the same features.
  HostBatch merge(std::span<const Part> parts, Session& session);

  // Bytes held for the next batch.
  std::size_t bytes() const { return begins_.bytes() + bags_.bytes(); }

 private:
  // How a group is found in a request.
  struct GroupView {
    JaggedView DecodedRequest::*view = nullptr;
    std::size_t features = 0;
    std::size_t first_feature = 0;  // among a Part's id ranges
    bool weighted = false;
  };

  static std::int64_t count_ids(const GroupView& group, std::span<const Part> parts);
  // `shared`: what the batch shares of this group.
  void fill(const GroupView& group, std::span<const Part> parts, const SharedRows& shared,
            std::size_t padding, const HostGroup& merged);

  std::size_t dense_features_;
  GroupView plain_;
  GroupView scored_;
  // While merging, of each part: its next id, and the next bag of its request.
  Buffer<std::int64_t> begins_;
  Buffer<std::size_t> bags_;
};

}  // namespace tessera
