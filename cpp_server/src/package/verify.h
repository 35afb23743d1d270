// Comparing every record of a package with the manifest's SHA-256, before anything runs.
//
// Contract: blocks on the disk; uses a few short-lived threads of its own. Throws PackageError.
#pragma once

#include <string>

#include "package/manifest.h"
#include "package/records.h"

namespace tessera {

// Throws when a record is missing, is there without being listed, or differs.
// Returns the SHA-256 of the whole file, lower-case hex.
std::string verify_records(const Records& records, const Manifest& manifest);

}  // namespace tessera
