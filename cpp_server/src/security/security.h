// What guards a server, and the files that it is made of: read when they change, and on SIGHUP.
//
// A file that has changed is taken for calls and connections that begin afterwards. One that cannot
// be used changes nothing: what was read before goes on, a line of the log says why, and
// tessera_secret_reloads_total counts it. docs/security.md tells more.
//
// Contract: look and read_again may be called by any thread, and block on the file system; the rest
// by any thread, and does not block. The metrics, the log and the clock outlive it.
#pragma once

#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "common/clock.h"
#include "common/mutex.h"
#include "front/http_page.h"
#include "http2/call_gate.h"
#include "http2/server_tls.h"
#include "metrics/security_metrics.h"
#include "security/authorizer.h"
#include "security/certificates.h"
#include "security/file_watch.h"
#include "server/config.h"
#include "server/log.h"

namespace tessera {

class Security {
 public:
  // Throws UsageError where a file has to be changed.
  Security(const ServerConfig& config, SecurityMetrics& metrics, const Clock& clock,
           const Log& log);

  // Whether there is anything to read again.
  bool has_files() const { return !watched_.empty(); }

  // Admits calls of the gRPC port; null: whoever reaches it may call.
  http2::CallGate* gate() const { return authorizer_.get(); }

  // What new connections encrypt with; null: they do not.
  const http2::ServerTls* grpc_tls() const { return grpc_tls_.get(); }
  const http2::ServerTls* http_tls() const { return http_tls_.get(); }

  // What refuses a request to the HTTP port; nothing: it may be answered.
  std::optional<HttpAnswer> refusal(const HttpHead& head) const;

  // Reads what has changed; to be called about once a second.
  void look();

  // Reads every file.
  void read_again();

 private:
  // Files of one kind; `read` reads them again and returns what the log tells of it.
  struct Watched {
    SecretReloads& counts;
    FileWatch watch;
    std::function<std::pair<std::string_view, Log::Value>()> read;
  };

  void add(SecretReloads& counts, std::vector<std::string> paths,
           std::function<std::pair<std::string_view, Log::Value>()> read);
  void read(const Watched& one);
  std::string use_certificates(const TlsFiles& files);

  const Log& log_;
  SecurityMetrics& metrics_;
  std::unique_ptr<Authorizer> authorizer_;
  std::unique_ptr<http2::ServerTls> grpc_tls_;
  std::unique_ptr<http2::ServerTls> http_tls_;
  Mutex mutex_;  // one thread reads at a time
  std::list<Watched> watched_;
};

}  // namespace tessera
