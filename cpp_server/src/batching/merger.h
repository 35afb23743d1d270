// Many jagged requests become one batch, feature-major: all requests' ids of the first
// feature, then all of the second. Ids become int64 whatever the clients sent, so that the
// model sees one type only; everything is copied, because operators may write to their inputs.
//
// Contract: a Merger is owned by one worker; a batch it returns lives in its memory until the
// next merge. It trusts the decoder's checks. Nothing blocks.
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

  // One batch of the rows of `parts`, in their order; at least one part.
  HostBatch merge(std::span<const Part> parts);

  // Bytes held for the next batch.
  std::size_t bytes() const;

 private:
  // One group's buffers and how to find it in a request.
  struct GroupBuffers {
    JaggedView DecodedRequest::*view = nullptr;
    std::size_t features = 0;
    std::size_t first_feature = 0;  // among a Part's id ranges
    bool weighted = false;
    Buffer<std::int32_t> lengths;
    Buffer<std::int64_t> values;
    Buffer<float> weights;
    Buffer<std::int64_t> begins;  // [parts]: next id of each part, while merging
  };

  static HostGroup merge_group(GroupBuffers& group, std::span<const Part> parts,
                               std::size_t samples);

  std::size_t dense_features_;
  Buffer<float> dense_;
  GroupBuffers plain_;
  GroupBuffers scored_;
};

}  // namespace tessera
