// The version that this program reports; the build sets it to that of the Python package.
#pragma once

namespace tessera {

extern const char* const kVersion;

}  // namespace tessera
