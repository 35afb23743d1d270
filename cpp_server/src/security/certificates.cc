#include "security/certificates.h"

#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/ssl.h>
#include <openssl/x509.h>

#include <ctime>
#include <memory>
#include <new>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "common/flags.h"
#include "common/text.h"
#include "repository/small_file.h"

namespace tessera {
namespace {

constexpr std::size_t kMaxFileBytes = std::size_t{1} << 20;

struct Free {
  void operator()(BIO* bio) const { ::BIO_free(bio); }
  void operator()(X509* certificate) const { ::X509_free(certificate); }
  void operator()(EVP_PKEY* key) const { ::EVP_PKEY_free(key); }
};
using Certificate = std::unique_ptr<X509, Free>;
using Key = std::unique_ptr<EVP_PKEY, Free>;

// The content of a file, as OpenSSL reads it; `content` outlives it.
std::unique_ptr<BIO, Free> reader_of(const std::string& content) {
  std::unique_ptr<BIO, Free> made(
      ::BIO_new_mem_buf(content.data(), static_cast<int>(content.size())));
  if (made == nullptr) throw std::bad_alloc();
  return made;
}

std::string content_of(const std::string& path) {
  std::optional<std::string> content = read_small_file(path, kMaxFileBytes);
  if (!content.has_value()) throw UsageError(path + ": there is no such file");
  return std::move(*content);
}

// A key that is encrypted is not asked about at a terminal.
int no_password(char* /*into*/, int /*room*/, int /*writes*/, void* /*user*/) { return 0; }

// At least one, in the order of the file.
std::vector<Certificate> read_certificates(const std::string& path) {
  const std::string content = content_of(path);
  const auto reader = reader_of(content);
  std::vector<Certificate> found;
  while (X509* const one = ::PEM_read_bio_X509(reader.get(), nullptr, &no_password, nullptr)) {
    found.emplace_back(one);
  }
  const unsigned long error = ::ERR_peek_last_error();
  ::ERR_clear_error();
  if (found.empty() || ERR_GET_REASON(error) != PEM_R_NO_START_LINE) {
    throw UsageError(path + ": is not a file of certificates in PEM");
  }
  return found;
}

Key read_key(const std::string& path) {
  const std::string content = content_of(path);
  Key key(::PEM_read_bio_PrivateKey(reader_of(content).get(), nullptr, &no_password, nullptr));
  ::ERR_clear_error();
  if (key == nullptr) {
    throw UsageError(path + ": is not a private key in PEM that needs no password");
  }
  return key;
}

http2::TlsContext new_context(const SSL_METHOD* method) {
  http2::TlsContext context(::SSL_CTX_new(method), &::SSL_CTX_free);
  if (context == nullptr) throw std::bad_alloc();
  ::SSL_CTX_set_options(context.get(), SSL_OP_NO_RENEGOTIATION | SSL_OP_NO_COMPRESSION |
                                           SSL_OP_NO_TICKET | SSL_OP_CIPHER_SERVER_PREFERENCE |
                                           SSL_OP_IGNORE_UNEXPECTED_EOF);
  ::SSL_CTX_set_num_tickets(context.get(), 0);
  SSL_CTX_set_session_cache_mode(context.get(), SSL_SESS_CACHE_OFF);
  SSL_CTX_set_mode(context.get(), SSL_MODE_RELEASE_BUFFERS);
  SSL_CTX_set_min_proto_version(context.get(), TLS1_2_VERSION);
  ::SSL_CTX_set_cipher_list(context.get(), "ECDHE+AESGCM:ECDHE+CHACHA20");
  return context;
}

// Shows the certificate and its chain to the other side. Returns when it ends.
std::chrono::system_clock::time_point use_certificate(SSL_CTX& context, const TlsFiles& files) {
  const std::vector<Certificate> chain = read_certificates(files.cert);
  const Key key = read_key(files.key);
  X509& own = *chain.front();
  if (::X509_check_private_key(&own, key.get()) != 1) {
    ::ERR_clear_error();
    throw UsageError(
        text(files.key, ": is not the private key of the first certificate in ", files.cert));
  }
  if (::X509_cmp_current_time(::X509_get0_notAfter(&own)) <= 0) {
    throw UsageError(files.cert + ": the certificate's time is over; make a new one");
  }
  bool used = ::SSL_CTX_use_certificate(&context, &own) == 1 &&
              ::SSL_CTX_use_PrivateKey(&context, key.get()) == 1;
  for (std::size_t i = 1; used && i < chain.size(); ++i) {
    used = SSL_CTX_add1_chain_cert(&context, chain[i].get()) == 1;
  }
  ::ERR_clear_error();
  if (!used) throw UsageError(files.cert + ": OpenSSL does not take the certificate or its key");
  std::tm ends{};
  ::ASN1_TIME_to_tm(::X509_get0_notAfter(&own), &ends);
  return std::chrono::system_clock::from_time_t(::timegm(&ends));
}

void trust(SSL_CTX& context, const std::string& path) {
  for (const Certificate& one : read_certificates(path)) {
    ::X509_STORE_add_cert(::SSL_CTX_get_cert_store(&context), one.get());
    ::SSL_CTX_add_client_CA(&context, one.get());
  }
  ::ERR_clear_error();
}

// ALPN's form of a list of one.
std::string wire_form(std::string_view protocol) {
  return static_cast<char>(protocol.size()) + std::string(protocol);
}

// Chooses the protocol that is spoken inside of those that a client names.
int choose_protocol(SSL* /*ssl*/, const unsigned char** chosen, unsigned char* length,
                    const unsigned char* named, unsigned named_bytes, void* user) {
  const std::string_view ours = static_cast<const char*>(user);
  unsigned char* found = nullptr;
  const std::string list = wire_form(ours);
  const int result =
      ::SSL_select_next_proto(&found, length, reinterpret_cast<const unsigned char*>(list.data()),
                              static_cast<unsigned>(list.size()), named, named_bytes);
  if (result != OPENSSL_NPN_NEGOTIATED) return SSL_TLSEXT_ERR_ALERT_FATAL;
  // `found` points into our list, which is about to go; the constant stays.
  *chosen = reinterpret_cast<const unsigned char*>(ours.data());
  return SSL_TLSEXT_ERR_OK;
}

}  // namespace

TlsSetup make_server_tls(const TlsFiles& files, const std::string& protocol) {
  TlsSetup setup;
  setup.context = new_context(::TLS_server_method());
  setup.ends = use_certificate(*setup.context, files);
  if (!files.ca.empty()) {
    trust(*setup.context, files.ca);
    ::SSL_CTX_set_verify(setup.context.get(), SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT,
                         nullptr);
  }
  static constexpr const char* kProtocols[] = {"h2", "http/1.1"};
  const char* const spoken = protocol == kProtocols[0] ? kProtocols[0] : kProtocols[1];
  ::SSL_CTX_set_alpn_select_cb(setup.context.get(), &choose_protocol, const_cast<char*>(spoken));
  return setup;
}

http2::TlsContext make_client_tls(const TlsFiles& files, const std::string& protocol) {
  http2::TlsContext context = new_context(::TLS_client_method());
  if (!files.cert.empty()) use_certificate(*context, files);
  if (files.ca.empty()) {
    ::SSL_CTX_set_default_verify_paths(context.get());
    ::ERR_clear_error();
  } else {
    trust(*context, files.ca);
  }
  ::SSL_CTX_set_verify(context.get(), SSL_VERIFY_PEER, nullptr);
  const std::string list = wire_form(protocol);
  ::SSL_CTX_set_alpn_protos(context.get(), reinterpret_cast<const unsigned char*>(list.data()),
                            static_cast<unsigned>(list.size()));
  return context;
}

}  // namespace tessera
