// The checks that several fields of a request share.
//
// Contract: free functions without state; any thread; nothing blocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "common/status.h"
#include "request/decoded_request.h"
#include "request/field_names.h"
#include "request/wire.h"

namespace tessera {

// `content` holds exactly `count` numbers of `item_bytes` bytes. The texts are for the message
// alone, which says "FIELD has ...".
Status check_size(std::string_view field, Bytes content, std::int64_t count, std::size_t item_bytes,
                  std::string_view type, std::string_view meaning);

// Lengths [F, rows] that are not negative and the ids that they promise, of either width. Where the
// message has a field for each width, 8 bytes for each id in `values` are int64, too.
// Fills `group` but for its weights.
Status read_jagged(const GroupNames& names, const SparseFeaturesView& message, std::int64_t F,
                   std::int64_t rows, std::string_view meaning, JaggedView& group);

// Sum over the features of `group`.
std::int64_t total_ids(const JaggedView& group);

// Index of the first number that is not finite (or, with `nan_passes`, is infinite); -1: none.
std::ptrdiff_t first_not_finite(Bytes floats, bool nan_passes);

// The id at `index` of either width.
std::int64_t id_at(const JaggedView& group, std::size_t index);

// Whether one of `count` ids from index `first` on is outside [0, rows); `rows` is above 0. Takes a
// small part of the time of asking id_at for each of them: most requests have none.
bool any_outside(const JaggedView& group, std::size_t first, std::size_t count, std::int64_t rows);

}  // namespace tessera
