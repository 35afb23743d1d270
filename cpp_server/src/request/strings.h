// Values that a request gives as strings, and the ids that the server makes of them.
//
// A message of few bytes can hold very many strings, so a view of them has their number and where
// they lie, and they are read on demand.
//
// Contract: views borrow the message's bytes. Free functions without state; any thread; nothing
// blocks.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "common/status.h"
#include "package/schema.h"
#include "request/bytes.h"

namespace tessera {

inline constexpr std::size_t kMaxStringBytes = 65'536;
inline constexpr std::size_t kMaxHexDigits = 8;

// What precedes each string of a raw tensor of BYTES: how many bytes it has.
inline constexpr std::size_t kStringHeadBytes = 4;

struct StringsView {
  std::size_t count = 0;
  Bytes message;  // a valid message that they lie in, or a raw tensor
  // The numbers of the fields that lead to them, from the outermost; a raw tensor has none, and a
  // path ends at a 0.
  std::array<std::uint32_t, 3> path{};
};

// How many strings a raw tensor of BYTES has; -1 where its bytes are not such strings.
std::int64_t count_raw_strings(Bytes raw);

// Makes the ids of `strings`, of which features[f] has counts[f]: XXH64 for a feature with strings,
// else the number, hexadecimal for a feature with `hex` and decimal for others. `lengths`, int32
// [features, rows], says which row a string is of. Refuses the first that is too long or not such a
// number, naming feature and row.
Status make_ids(std::string_view field, const std::vector<const FeatureSpec*>& features,
                const std::vector<std::int64_t>& counts, Bytes lengths, std::int64_t rows,
                const StringsView& strings, std::vector<std::int64_t>& ids);

}  // namespace tessera
