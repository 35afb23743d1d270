// User features that a ranking request gives once: check them, then put them between the others.
// A model that shares rows gets them as they are and looks each id up once; for another one they
// are spread over the samples, so that it sees an ordinary request.
//
// Legend: B samples, S shared features, R shared rows (users), F features of the group.
//
// Contract: free functions without state; any thread; nothing blocks.
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "common/status.h"
#include "request/decoded_request.h"
#include "request/wire.h"

namespace tessera {

// Checked shared features; the views borrow the message.
struct SharedGroup {
  std::vector<std::size_t> positions;  // [S]: where each belongs among the F features
  std::int64_t rows = 0;               // R
  JaggedView features;                 // lengths [S * R]
  Bytes row_index;                     // int32 [B], each in [0, R)
  std::int64_t spread_ids = 0;         // after every sample has its own copy
};

// Checks `message`; `position` gives each id_list feature's place, `max_rows` is the most rows that
// it may have.
Status decode_shared(const SharedFeaturesView& message,
                     const std::unordered_map<std::string, std::size_t>& position, std::int64_t B,
                     std::int64_t max_rows, SharedGroup& shared);

// Puts the request's own features (`own`, in the schema's order) and the shared ones into the
// schema's order, the latter with their R bags each. `group` views `storage` afterwards.
void join_shared(const JaggedView& own, const SharedGroup& shared, std::size_t F, std::int64_t B,
                 JoinedStorage& storage, JaggedView& group);

// The same with a copy of the shared features for every sample.
void spread_shared(const JaggedView& own, const SharedGroup& shared, std::size_t F, std::int64_t B,
                   JoinedStorage& storage, JaggedView& group);

}  // namespace tessera
