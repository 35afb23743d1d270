// The number of a model's version: a positive integer, the name of a folder in a repository.
//
// Contract: free functions without state; any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace tessera {

using Version = std::int64_t;  // from 1 to 2^63 - 1

// The version that `name` writes: digits without a sign, spaces or leading zeros, as
// std::to_string writes it. Nothing for any other text.
std::optional<Version> parse_version(std::string_view name);

// Whether `name` may be a label: a letter, then letters, digits, "_" and "-", at most
// kMaxLabelBytes of them; all ASCII.
bool is_label(std::string_view name);

inline constexpr std::size_t kMaxLabelBytes = 64;

// What messages say of a label.
std::string label_rule();

// Whether `name` may be a model's: letters, digits, "_", "-" and ".", not beginning with a dot, at
// most kMaxModelNameBytes; all ASCII, so that it needs no escapes in a path of HTTP.
bool is_model_name(std::string_view name);

inline constexpr std::size_t kMaxModelNameBytes = 128;

}  // namespace tessera
