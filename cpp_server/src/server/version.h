// The version that this program reports; the build sets it to that of the Python package.
#pragma once

namespace tessera {

inline constexpr const char* kVersion = TESSERA_VERSION;

}  // namespace tessera
