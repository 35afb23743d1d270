// The rules of the manifest's fields, which both readers of packages obey (format_rules.h).
//
// Contract: free functions without state; any thread; nothing blocks.
#pragma once

#include <nlohmann/json_fwd.hpp>

namespace tessera {

// Throws std::invalid_argument, naming the field, where a key is missing or unknown, or a value is
// of another type or out of its range than kManifestRules says of `version`, which is from
// kOldestFormatVersion to kFormatVersion.
void check_manifest_fields(const nlohmann::json& manifest, int version);

}  // namespace tessera
