// A request whose every size has been checked, ready to be merged with others.
//
// Legend: B samples of the request, F features of a group, N ids of a group.
//
// Contract: the views borrow the message's bytes (or `joined`, where there are shared features),
// which must live until the request is answered. Written by the decoder, read-only afterwards.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "request/wire.h"

namespace tessera {

struct JaggedView {
  Bytes lengths;        // int32 [F * B], feature-major, none negative; of a SharedRows feature [R]
  Bytes values;         // int32 or int64 [N], feature-major
  Bytes weights;        // float32 [N]; empty for a group without weights
  bool wide = false;    // values are int64
  StringsView strings;  // what the values are made of, where the request gives strings
  std::vector<std::int64_t> ids;  // [F]: ids of each feature over all samples
};

// Numbers that decoding writes anew: the request's own features and the shared ones in the schema's
// order (see shared.h), and the ids of strings.
struct JoinedStorage {
  std::vector<std::int32_t> lengths;
  std::vector<std::int64_t> values;
  // Three lists: the request's own id_list features, the shared ones, the id_score_list features.
  std::array<std::vector<std::int64_t>, 3> string_ids;

  std::size_t used_bytes() const {
    return lengths.size() * sizeof(std::int32_t) + values.size() * sizeof(std::int64_t);
  }

  std::size_t string_id_bytes() const {
    std::size_t count = 0;
    for (const auto& ids : string_ids) count += ids.size();
    return count * sizeof(std::int64_t);
  }

  // Held, whether used or not.
  std::size_t bytes() const {
    std::size_t wide = values.capacity();
    for (const auto& ids : string_ids) wide += ids.capacity();
    return lengths.capacity() * sizeof(std::int32_t) + wide * sizeof(std::int64_t);
  }
};

// Which id_list features the request gives once for several of its samples.
struct SharedRows {
  std::vector<std::uint8_t> features;  // [F]: 1 for those that are; empty where none is
  std::int64_t rows = 0;               // R: how many bags each of them has
  Bytes row_index;                     // int32 [B], each in [0, R)

  bool any() const { return !features.empty(); }
  bool has(std::size_t feature) const { return any() && features[feature] != 0; }
};

struct DecodedRequest {
  std::int64_t samples = 0;  // B
  std::int64_t ids = 0;      // of both groups, as they are looked up
  std::int64_t out_of_range_ids = 0;
  Bytes dense;  // float32 [B * F_dense], row-major
  JaggedView id_list;
  JaggedView id_score_list;
  SharedRows shared;
  JoinedStorage joined;

  // How many bags of the id_list feature `feature` there are.
  std::int64_t bags(std::size_t feature) const {
    return shared.has(feature) ? shared.rows : samples;
  }
};

}  // namespace tessera
