#include "server/observe_flags.h"

#include <string>

namespace tessera {

std::vector<Flag> observe_flags(ServerConfig& config) {
  return {
      {"access-log", "FILE",
       "a file that gets a line of JSON for each call for scores, with the peer's address, the model "
       "and how the call ended; -: the standard output; SIGHUP opens the file anew, docs/observe.md "
       "(default: none)",
       [&](const std::string& value) { config.access_log = value; }},
  };
}

}  // namespace tessera
