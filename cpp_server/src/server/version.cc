#include "server/version.h"

namespace tessera {

const char* const kVersion = TESSERA_VERSION;

}  // namespace tessera
