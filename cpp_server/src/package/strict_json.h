// The JSON of an archive's last record, read strictly.
//
// Contract: a free function without state; any thread; nothing blocks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <span>
#include <string_view>

namespace tessera {

// The value that `json` writes down: ASCII, no key twice in an object, at most `max_marks` of the
// letters `,`, `:`, `[` and `{`. Throws std::invalid_argument; `what` names the record in it.
nlohmann::json parse_ascii_json(std::span<const std::byte> json, std::string_view what,
                                std::int64_t max_marks);

}  // namespace tessera
