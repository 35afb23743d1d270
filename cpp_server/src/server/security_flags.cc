#include "server/security_flags.h"

#include <string>

namespace tessera {

std::vector<Flag> security_flags(ServerConfig& config) {
  return {
      {"tls-cert", "FILE",
       "the certificate of both ports in PEM, and those between it and an authority that clients "
       "know; read again when it changes and on SIGHUP, as are the next two, docs/security.md "
       "(default: none, connections are not encrypted)",
       [&](const std::string& value) { config.tls_cert = value; }},
      {"tls-key", "FILE",
       "the private key of --tls-cert in PEM, without a password (default: none)",
       [&](const std::string& value) { config.tls_key = value; }},
      {"tls-client-ca", "FILE",
       "authorities in PEM, one of which must have signed the certificate that each client then "
       "needs, on both ports, probes too (default: none, clients need no certificate)",
       [&](const std::string& value) { config.tls_client_ca = value; }},
      {"auth-token-file", "FILE",
       "the tokens that calls on both ports need one of, health checks aside: one a line, TOKEN "
       "[NAME [CALLS_PER_S]]; read again when it changes and on SIGHUP, docs/security.md "
       "(default: none, whoever reaches a port may call)",
       [&](const std::string& value) { config.auth_token_file = value; }},
      {"allowed-host", "NAME",
       "a name by which browsers may ask the HTTP port for its pages, beside IP addresses and "
       "localhost, such as ranker.example.com; *: any; may be given several times, "
       "docs/security.md (default: none where --host is this machine alone, else any)",
       [&](const std::string& value) { config.allowed_hosts.push_back(checked_host_name(value)); },
       /*repeatable=*/true},
  };
}

HostRule host_rule(const ServerConfig& config) {
  return HostRule({.listens_on = config.host,
                   .allowed = config.allowed_hosts,
                   .guarded = !config.tls_cert.empty() || !config.auth_token_file.empty()});
}

void check_security(const ServerConfig& config) {
  if (config.tls_cert.empty() && !config.tls_key.empty()) {
    refuse_flag("tls-key", "'" + config.tls_key + "'", "it needs its certificate; add --tls-cert");
  }
  if (config.tls_key.empty() && !config.tls_cert.empty()) {
    refuse_flag("tls-cert", "'" + config.tls_cert + "'", "it needs its private key; add --tls-key");
  }
  if (config.tls_cert.empty() && !config.tls_client_ca.empty()) {
    refuse_flag("tls-client-ca", "'" + config.tls_client_ca + "'",
                "the server needs a certificate of its own; add --tls-cert and --tls-key");
  }
}

}  // namespace tessera
