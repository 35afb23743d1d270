// Who signed a package: an Ed25519 signature (RFC 8032) over the manifest, which names the hash of
// everything else. serving/FORMAT.md, "The signature", has the exact text.
//
// Contract: plain values and free functions; any thread; reading keys blocks on the disk.
#pragma once

#include <array>
#include <cstddef>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

// The 32 bytes of an Ed25519 public key.
using PublicKey = std::array<unsigned char, 32>;

std::string hex_of(const PublicKey& key);

// Reads a PEM file as `openssl pkey -pubout` writes it. Throws UsageError naming the file.
PublicKey read_public_key(const std::string& path);

struct Signature {
  PublicKey key{};  // that it claims to be of
  std::array<unsigned char, 64> value{};
  std::string message;  // what was signed: the manifest with no signature in it
};

// The signature at the end of the bytes of a manifest, or of another archive's last record, which
// messages call `what`; none where it says null. Throws std::invalid_argument when the record ends
// in neither of the two ways that there are.
std::optional<Signature> read_signature(std::span<const std::byte> manifest,
                                        std::string_view what = "the manifest");

// SHA-256 of such bytes with no signature in them, lower-case hex: the same however they are
// signed. Throws as read_signature does.
std::string unsigned_sha256(std::span<const std::byte> manifest);

// Whether the signature is of the key `trusted` over its message.
bool holds(const Signature& signature, const PublicKey& trusted);

// Throws PackageError unless one of `trusted` signed the manifest of the package at `path`; or the
// last record of another archive, which messages call `what` and of which `remedy` says how to get
// it signed.
void require_signature(
    const std::string& path, std::span<const std::byte> manifest,
    std::span<const PublicKey> trusted, std::string_view what = "package",
    std::string_view remedy = "sign it with: tessera sign MODEL.pt --key KEY.pem");

}  // namespace tessera
