// What must hold of an archive's records before torch opens them: their names, what the pickles
// name, the storages' sizes, and the source that would run while it is opened.
//
// Contract: free functions without state; any thread; nothing blocks. Throw PackageError.
#pragma once

#include <cstddef>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "package/records.h"

namespace tessera {

// Contents by the record's name.
using ParsedContents = std::map<std::string, std::vector<std::byte>>;

// Refuses records that packages do not have.
void check_names(const Records& records);

// Refuses what torch would run while it opens the archive, or read past a storage's end. Of
// `contents`, which were compared with their hashes, those are looked at that torch parses.
// `allow_ops`: operators that are allowed beside kAllowedOperators.
void check_contents(const Records& records, const ParsedContents& contents,
                    const std::set<std::string>& allow_ops);

}  // namespace tessera
