// What tokens and certificates did: calls that were refused, and files that were read again.
//
// Contract: any thread; nothing blocks.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <string_view>

namespace tessera {

// The `reason` labels of tessera_calls_refused_total.
enum class TokenRefusal { kNoToken, kUnknownToken, kRate };
inline constexpr auto kTokenRefusalNames =
    std::to_array<std::string_view>({"no_token", "unknown_token", "rate"});

// Files of one kind: the `files` label of tessera_secret_reloads_total.
struct SecretReloads {
  std::string_view files;
  std::atomic<bool> watched = false;  // shown only then
  std::atomic<std::uint64_t> taken = 0;
  std::atomic<std::uint64_t> refused = 0;
};

struct SecurityMetrics {
  std::array<std::atomic<std::uint64_t>, kTokenRefusalNames.size()> refused{};
  SecretReloads tokens{"tokens"};
  SecretReloads certificates{"certificates"};
  std::atomic<double> certificate_ends = 0;  // seconds since 1970; of certificates alone

  void count(TokenRefusal refusal) {
    refused[static_cast<std::size_t>(refusal)].fetch_add(1, std::memory_order_relaxed);
  }
};

}  // namespace tessera
