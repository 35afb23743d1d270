// A request whose every size has been checked, ready to be merged with others.
//
// Legend: B samples of the request, F features of a group, N ids of a group.
//
// Contract: the views borrow the message's bytes (or `spread`, for shared features), which
// must live until the request is answered. Written by the decoder, read-only afterwards.
#pragma once

#include <cstdint>
#include <vector>

#include "request/wire.h"

namespace tessera {

struct JaggedView {
  Bytes lengths;  // int32 [F * B], feature-major, none negative
  Bytes values;   // int32 or int64 [N], feature-major
  Bytes weights;  // float32 [N]; empty for a group without weights
  bool wide = false;                     // values are int64
  std::vector<std::int64_t> ids;  // [F]: ids of each feature over all samples
};

// What spreading shared features over the samples made; see decoder.h.
struct SpreadStorage {
  std::vector<std::int32_t> lengths;
  std::vector<std::int64_t> values;
};

struct DecodedRequest {
  std::int64_t samples = 0;  // B
  std::int64_t ids = 0;      // of both groups
  std::int64_t out_of_range_ids = 0;
  Bytes dense;  // float32 [B * F_dense], row-major
  JaggedView id_list;
  JaggedView id_score_list;
  SpreadStorage spread;
};

}  // namespace tessera
