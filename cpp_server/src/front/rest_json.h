// JSON of a request over REST: strict, and bounded in size and depth before it is read.
//
// Both servers refuse the same texts with the same words, so the checks have an order: size, depth,
// grammar, keys. Where the grammar does not hold, no place is told, for readers differ in where
// they notice it.
//
// Contract: a free function without state; any thread. For source files alone that see nlohmann's
// header.
#pragma once

#include <cstddef>
#include <nlohmann/json_fwd.hpp>
#include <string_view>

#include "common/status.h"

namespace tessera {

// Enough for 400,000 ids: some 50 ms of a thread. Tensors that are larger travel as binary data.
inline constexpr std::size_t kMaxJsonBytes = 4 * 1024 * 1024;

// Reads `content` into `json`; the status says why it cannot be.
Status read_rest_json(std::string_view content, nlohmann::json& json);

}  // namespace tessera
