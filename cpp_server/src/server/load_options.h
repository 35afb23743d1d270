// How a program loads packages, as its flags say.
//
// Contract: free functions; read_keys reads files and throws PackageError or UsageError where one
// holds no key.
#pragma once

#include <vector>

#include "model/loader.h"
#include "package/signature.h"
#include "server/config.h"

namespace tessera {

// The keys of --public-key.
std::vector<PublicKey> read_keys(const ServerConfig& config);

LoadOptions load_options(const ServerConfig& config, std::vector<PublicKey> trusted);

}  // namespace tessera
