#include "server/load_options.h"

#include <string>
#include <utility>

#include "model/operator_libraries.h"

namespace tessera {

std::vector<PublicKey> read_keys(const ServerConfig& config) {
  std::vector<PublicKey> keys;
  for (const std::string& path : config.public_keys) keys.push_back(read_public_key(path));
  return keys;
}

LoadOptions load_options(const ServerConfig& config, std::vector<PublicKey> trusted) {
  return {.verify_golden = config.verify_golden,
          .require_signature = config.require_signature,
          .trusted = std::move(trusted),
          .library_folders = library_folders(config.ops_dirs),
          .load_timeout_s = config.load_timeout_s,
          .allow_ops = {config.allow_ops.begin(), config.allow_ops.end()},
          .gpu = {.devices = config.gpus, .max_batch_samples = config.batch_limits.max_samples}};
}

}  // namespace tessera
