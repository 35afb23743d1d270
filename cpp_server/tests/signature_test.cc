// Signatures of packages, and the public keys that they are held against.
#include <gtest/gtest.h>

#include <cstdio>
#include <span>
#include <stdexcept>
#include <string>

#include "common/flags.h"
#include "package/package_error.h"
#include "package/signature.h"
#include "support.h"
#include "zip_writer.h"

namespace tessera {
namespace {

using test::as_bytes;

// The first test vector with a message in RFC 8032, section 7.1 ("TEST 2"), and its key as PEM.
constexpr const char* kRfcKey = "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c";

TEST(SignatureTest, ReadsPublicKeys) {
  const std::string path = testing::TempDir() + "tessera_public_key.pem";
  test::write_file(path,
                   "-----BEGIN PUBLIC KEY-----\n"
                   "MCowBQYDK2VwAyEAPUAXw+hDiVqStwqnTRt+vJyYLM8uxJaMwM1V8Sr0Zgw=\n"
                   "-----END PUBLIC KEY-----\n");
  EXPECT_EQ(hex_of(read_public_key(path)), kRfcKey);
  test::write_file(path, "no key");
  EXPECT_THROW(read_public_key(path), UsageError);
  std::remove(path.c_str());
  EXPECT_THROW(read_public_key(path), UsageError);
}

TEST(SignatureTest, HoldsForTheSignedMessageAndKeyAlone) {
  Signature signature;
  signature.key = {0x3d, 0x40, 0x17, 0xc3, 0xe8, 0x43, 0x89, 0x5a, 0x92, 0xb7, 0x0a,
                   0xa7, 0x4d, 0x1b, 0x7e, 0xbc, 0x9c, 0x98, 0x2c, 0xcf, 0x2e, 0xc4,
                   0x96, 0x8c, 0xc0, 0xcd, 0x55, 0xf1, 0x2a, 0xf4, 0x66, 0x0c};
  signature.message = "\x72";
  signature.value = {0x92, 0xa0, 0x09, 0xa9, 0xf0, 0xd4, 0xca, 0xb8, 0x72, 0x0e, 0x82, 0x0b, 0x5f,
                     0x64, 0x25, 0x40, 0xa2, 0xb2, 0x7b, 0x54, 0x16, 0x50, 0x3f, 0x8f, 0xb3, 0x76,
                     0x22, 0x23, 0xeb, 0xdb, 0x69, 0xda, 0x08, 0x5a, 0xc1, 0xe4, 0x3e, 0x15, 0x99,
                     0x6e, 0x45, 0x8f, 0x36, 0x13, 0xd0, 0xf1, 0x1d, 0x8c, 0x38, 0x7b, 0x2e, 0xae,
                     0xb4, 0x30, 0x2a, 0xee, 0xb0, 0x0d, 0x29, 0x16, 0x12, 0xbb, 0x0c, 0x00};
  EXPECT_EQ(hex_of(signature.key), kRfcKey);
  EXPECT_TRUE(holds(signature, signature.key));
  Signature other = signature;
  other.message = "\x73";
  EXPECT_FALSE(holds(other, other.key));
  other = signature;
  other.value[0] ^= 1;
  EXPECT_FALSE(holds(other, other.key));
  PublicKey another = signature.key;
  another[5] ^= 4;
  EXPECT_FALSE(holds(signature, another));
}

std::string signed_manifest(const std::string& key, const std::string& value) {
  return "{\n \"name\": \"x\",\n \"signature\": {\n  \"algorithm\": \"ed25519\",\n"
         "  \"public_key\": \"" +
         key + "\",\n  \"value\": \"" + value + "\"\n }\n}\n";
}

TEST(SignatureTest, IsReadInOneSpellingOnly) {
  const std::string value(128, 'a');
  const auto read = read_signature(as_bytes(signed_manifest(kRfcKey, value)));
  ASSERT_TRUE(read.has_value());
  EXPECT_EQ(hex_of(read->key), kRfcKey);
  EXPECT_EQ(read->value[63], 0xaa);
  EXPECT_EQ(read->message, "{\n \"name\": \"x\",\n \"signature\": null\n}\n");
  EXPECT_FALSE(read_signature(as_bytes(read->message)).has_value());
  const std::string bad[] = {"",
                             "}\n",
                             signed_manifest(kRfcKey, value) + "\n",
                             signed_manifest(kRfcKey, std::string(128, 'A')),
                             signed_manifest(kRfcKey, std::string(127, 'a')),
                             signed_manifest(std::string(63, '1') + "g", value)};
  for (const std::string& manifest : bad) {
    EXPECT_THROW(read_signature(as_bytes(manifest)), std::invalid_argument) << manifest;
  }
}

TEST(SignatureTest, IsRequiredOfATrustedKey) {
  PublicKey key{};
  const auto why = [](const std::string& manifest, std::span<const PublicKey> trusted) {
    try {
      require_signature("m.pt", as_bytes(manifest), trusted);
    } catch (const PackageError& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  const std::string zeros(64, '0');
  EXPECT_EQ(why("{\n \"signature\": null\n}\n", {&key, 1}),
            "package m.pt: is not signed, and --require-signature is set; sign it with: tessera "
            "sign MODEL.pt --key KEY.pem");
  EXPECT_EQ(why(signed_manifest(kRfcKey, zeros + zeros), {&key, 1}),
            std::string("package m.pt: was signed with the key ") + kRfcKey +
                ", which is none of those given by --public-key");
  key[0] = 1;
  const std::string one = "01" + std::string(62, '0');
  EXPECT_EQ(why(signed_manifest(one, std::string(128, '5')), {&key, 1}),
            "package m.pt: has a signature of the key " + one +
                " that does not hold: the package was changed after it was signed");
}

}  // namespace
}  // namespace tessera
