// The rules of the fields of manifests and commits, which both readers of them obey
// (format_rules.h).
//
// Contract: free functions without state; any thread; nothing blocks.
#pragma once

#include <nlohmann/json_fwd.hpp>

namespace tessera {

// Throws std::invalid_argument, naming the field, where a key is missing or unknown, or a value is
// of another type or out of its range than kManifestRules says of `version`, which is from
// kOldestFormatVersion to kFormatVersion.
void check_manifest_fields(const nlohmann::json& manifest, int version);

// The same of commit.json and kCommitRules.
void check_commit_fields(const nlohmann::json& commit);

}  // namespace tessera
