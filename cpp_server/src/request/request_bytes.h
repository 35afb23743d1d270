// What a request takes of the byte budget (--max-inflight-bytes) from its arrival until its answer
// has left. Counted as soon as its sizes are known, before anything of it is queued or computed;
// both servers count the same:
//
//     16 KiB                                                      the call, and what stands around
//     it
//   + the message                                                 it is read in place
//   + copies                                                      numbers that decoding writes anew
//   + shared rows x sum over the shared features of (8 + 4 dim)   see shared_bytes
//   + samples x 4 x (sum of all features' dim + sum of the outputs' widths)
//
// The last two are what a forward pass makes of few bytes: a bag without an id takes four bytes in
// the message, and its pooled vector 4 dim bytes in the model, which are the largest tensors that
// models here make; scores are written once more into the answer. What is shared by all requests
// (the batch's arrays) is bounded by --max-batch-samples and --max-batch-ids for each worker.
//
// Contract: immutable after construction; any thread; nothing blocks.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>

#include "package/schema.h"
#include "request/wire.h"

namespace tessera {

class RequestBytes {
 public:
  static constexpr std::int64_t kCall = 16 * 1024;

  explicit RequestBytes(const InputSchema& schema) {
    std::int64_t floats = 0;
    for (const FeatureSpec& feature : schema.features) {
      floats += feature.dim;
      if (feature.group == Group::kIdList) {
        row_bytes_[feature.name] = 2 * kLengthBytes + kFloatBytes * feature.dim;
      }
    }
    for (const OutputSpec& output : schema.outputs) floats += output.width;
    sample_bytes_ = kFloatBytes * floats;
  }

  // What the pooled vectors and the scores of so many samples take.
  std::int64_t samples_bytes(std::int64_t samples) const { return samples * sample_bytes_; }

  // What the rows of checked shared features take: each feature's length, as it came and in the
  // batch, and its pooled vector. A row costs this whether or not a sample names it.
  std::int64_t shared_bytes(const SharedFeaturesView& shared) const {
    if (!shared.present) return 0;
    std::int64_t row = 0;
    for (const std::string_view name : shared.names) row += row_bytes_.at(std::string(name));
    return shared.num_rows * row;
  }

 private:
  static constexpr std::int64_t kLengthBytes = 4;
  static constexpr std::int64_t kFloatBytes = 4;

  std::unordered_map<std::string, std::int64_t> row_bytes_;  // by id_list feature
  std::int64_t sample_bytes_ = 0;
};

}  // namespace tessera
