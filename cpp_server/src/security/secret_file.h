// Files that hold secrets.
//
// Contract: a free function without state; any thread; it blocks on the file system.
#pragma once

#include <string>

#include "server/log.h"

namespace tessera {

// Warns of a secret file that every user of this machine may read.
void warn_if_readable(const std::string& path, const Log& log);

}  // namespace tessera
