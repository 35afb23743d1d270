// gRPC's words in HTTP/2's headers and data, as gRPC publishes them:
// https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md
//
// Contract: free functions without state; any thread.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "common/clock.h"
#include "common/enums.h"

namespace tessera::http2 {

// Before each message: whether it is compressed, and its size in four bytes, the highest first.
inline constexpr std::size_t kPrefixBytes = 5;
using Prefix = std::array<std::byte, kPrefixBytes>;

inline std::uint32_t size_of(const Prefix& prefix) {
  std::uint32_t size = 0;
  for (std::size_t i = 1; i < kPrefixBytes; ++i) {
    size = size << 8U | static_cast<std::uint32_t>(prefix[i]);
  }
  return size;
}

inline void write_prefix(std::size_t size, std::byte* out) {
  out[0] = std::byte{0};
  for (std::size_t i = 1; i < kPrefixBytes; ++i) {
    out[i] = static_cast<std::byte>(size >> (8 * (kPrefixBytes - 1 - i)));
  }
}

// How a call's compressed messages are compressed: the header grpc-encoding.
enum class Encoding { kIdentity, kGzip, kDeflate };
inline constexpr auto kEncodingNames =
    std::to_array<std::string_view>({"identity", "gzip", "deflate"});
static_assert(kEncodingNames.size() == enum_size<Encoding::kDeflate>());
// The header grpc-accept-encoding.
inline constexpr std::string_view kAcceptedEncodings = "identity,deflate,gzip";

// Nothing where this server does not know `name`.
std::optional<Encoding> encoding_of(std::string_view name);

// "application/grpc", alone or with a subtype ("+proto") or parameters (";").
bool is_grpc_content(std::string_view content_type);

// When a call with the header "grpc-timeout: VALUE" ends: up to eight digits and a unit, of H, M,
// S, m, u and n. Nothing where VALUE is something else.
std::optional<TimePoint> deadline_after(TimePoint now, std::string_view value);

// A status's text as its header holds it: every byte that is not printable ASCII, and '%', as %XX.
// Of a longer text the first thousand bytes.
std::string percent_encoded(std::string_view message);

}  // namespace tessera::http2
