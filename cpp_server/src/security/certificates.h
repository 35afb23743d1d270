// Certificates and keys in PEM files, and the TLS that is made of them: 1.2 and 1.3, forward-secret
// ciphers with authentication, no renegotiation, no compression, no resumption.
//
// Contract: free functions without state; any thread; they block on the file system. A file that
// has to be changed throws UsageError, whose text is one line that names it and quotes nothing of a
// key.
#pragma once

#include <chrono>
#include <string>

#include "http2/tls_session.h"

namespace tessera {

struct TlsFiles {
  std::string cert;  // the certificate, and those between it and an authority that clients know
  std::string key;   // its private key, not encrypted
  std::string ca;    // authorities; empty: of a server, that clients need no certificate
};

struct TlsSetup {
  http2::TlsContext context;
  std::chrono::system_clock::time_point ends;  // of the certificate
};

// What a server's connections encrypt with. `protocol` is the one that is spoken inside, "h2" or
// "http/1.1": a client that names others alone (ALPN) is refused.
TlsSetup make_server_tls(const TlsFiles& files, const std::string& protocol);

// What a client's connections encrypt with; `cert` and `key` may be empty. Without `ca` the
// authorities are those of the system, as OpenSSL finds them (SSL_CERT_FILE and SSL_CERT_DIR of the
// environment name others).
http2::TlsContext make_client_tls(const TlsFiles& files, const std::string& protocol);

}  // namespace tessera
