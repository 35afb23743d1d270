#include "package/signature.h"

#include <openssl/evp.h>
#include <openssl/pem.h>

#include <cstdio>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string_view>

#include "common/flags.h"
#include "common/text.h"
#include "package/package_error.h"
#include "package/sha256.h"

namespace tessera {
namespace {

constexpr std::string_view kUnsigned = "\n \"signature\": null\n}\n";
constexpr std::string_view kBeforeKey =
    "\n \"signature\": {\n  \"algorithm\": \"ed25519\",\n  \"public_key\": \"";
constexpr std::string_view kBeforeValue = "\",\n  \"value\": \"";
constexpr std::string_view kAfterValue = "\"\n }\n}\n";

using Key = std::unique_ptr<EVP_PKEY, decltype(&EVP_PKEY_free)>;

int digit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  return -1;
}

template <std::size_t N>
bool read_hex(std::string_view digits, std::array<unsigned char, N>& bytes) {
  if (digits.size() != 2 * N) return false;
  for (std::size_t i = 0; i < N; ++i) {
    const int high = digit(digits[2 * i]);
    const int low = digit(digits[2 * i + 1]);
    if (high < 0 || low < 0) return false;
    bytes[i] = static_cast<unsigned char>(16 * high + low);
  }
  return true;
}

[[noreturn]] void refuse_key(const std::string& path, std::string_view why) {
  throw UsageError(text("--public-key ", path, " ", why,
                        "; give a PEM file with an Ed25519 public key, as tessera keygen or "
                        "openssl pkey -pubout writes it"));
}

}  // namespace

std::string hex_of(const PublicKey& key) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string hex;
  for (const unsigned char byte : key) {
    hex += kDigits[byte >> 4];
    hex += kDigits[byte & 15];
  }
  return hex;
}

PublicKey read_public_key(const std::string& path) {
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "re"),
                                                             &std::fclose);
  if (file == nullptr) refuse_key(path, text("cannot be read: ", std::strerror(errno)));
  const Key key(PEM_read_PUBKEY(file.get(), nullptr, nullptr, nullptr), &EVP_PKEY_free);
  if (key == nullptr || EVP_PKEY_id(key.get()) != EVP_PKEY_ED25519) {
    refuse_key(path, "holds no Ed25519 public key");
  }
  PublicKey bytes{};
  std::size_t size = bytes.size();
  if (EVP_PKEY_get_raw_public_key(key.get(), bytes.data(), &size) != 1 || size != bytes.size()) {
    refuse_key(path, "holds no Ed25519 public key");
  }
  return bytes;
}

std::optional<Signature> read_signature(std::span<const std::byte> manifest,
                                        std::string_view what) {
  const std::string_view all(reinterpret_cast<const char*>(manifest.data()), manifest.size());
  if (all.ends_with(kUnsigned)) return std::nullopt;
  Signature found;
  const std::size_t tail = kBeforeKey.size() + 2 * found.key.size() + kBeforeValue.size() +
                           2 * found.value.size() + kAfterValue.size();
  std::string_view rest = all.size() < tail ? all : all.substr(all.size() - tail);
  const auto skip = [&](std::string_view expected) {
    const bool there = rest.starts_with(expected);
    if (there) rest.remove_prefix(expected.size());
    return there;
  };
  bool good = skip(kBeforeKey) && read_hex(rest.substr(0, 2 * found.key.size()), found.key);
  if (good) rest.remove_prefix(2 * found.key.size());
  good =
      good && skip(kBeforeValue) && read_hex(rest.substr(0, 2 * found.value.size()), found.value);
  if (good) rest.remove_prefix(2 * found.value.size());
  if (!good || rest != kAfterValue) {
    throw std::invalid_argument(text(what, "'s signature is not written as package files have it"));
  }
  found.message = std::string(all.substr(0, all.size() - tail)) + std::string(kUnsigned);
  return found;
}

std::string unsigned_sha256(std::span<const std::byte> manifest) {
  const std::optional<Signature> signature = read_signature(manifest);
  Sha256 digest;
  digest.update(signature.has_value() ? std::as_bytes(std::span(signature->message)) : manifest);
  return digest.hex();
}

bool holds(const Signature& signature, const PublicKey& trusted) {
  const Key key(
      EVP_PKEY_new_raw_public_key(EVP_PKEY_ED25519, nullptr, trusted.data(), trusted.size()),
      &EVP_PKEY_free);
  const std::unique_ptr<EVP_MD_CTX, decltype(&EVP_MD_CTX_free)> context(EVP_MD_CTX_new(),
                                                                        &EVP_MD_CTX_free);
  if (key == nullptr || context == nullptr ||
      EVP_DigestVerifyInit(context.get(), nullptr, nullptr, nullptr, key.get()) != 1) {
    throw std::runtime_error("OpenSSL cannot check Ed25519 signatures");
  }
  return EVP_DigestVerify(context.get(), signature.value.data(), signature.value.size(),
                          reinterpret_cast<const unsigned char*>(signature.message.data()),
                          signature.message.size()) == 1;
}

void require_signature(const std::string& path, std::span<const std::byte> manifest,
                       std::span<const PublicKey> trusted, std::string_view what,
                       std::string_view remedy) {
  std::optional<Signature> signature;
  try {
    signature = read_signature(manifest);
  } catch (const std::invalid_argument& error) {
    throw PackageError(path, error.what());
  }
  if (!signature.has_value()) {
    throw PackageError(path, text("is not signed, and --require-signature is set; ", remedy));
  }
  for (const PublicKey& key : trusted) {
    if (key != signature->key) continue;
    if (holds(*signature, key)) return;
    throw PackageError(
        path, text("has a signature of the key ", hex_of(key), " that does not hold: the ", what,
                   " was changed after it was signed"));
  }
  throw PackageError(path, text("was signed with the key ", hex_of(signature->key),
                                ", which is none of those given by --public-key"));
}

}  // namespace tessera
