#include "security/security.h"

#include <algorithm>
#include <ctime>
#include <iomanip>
#include <sstream>
#include <utility>

#include "common/flags.h"
#include "common/text.h"
#include "front/repository_http.h"
#include "security/secret_file.h"

namespace tessera {
Security::Security(const ServerConfig& config, SecurityMetrics& metrics, const Clock& clock,
                   const Log& log)
    : log_(log), metrics_(metrics) {
  if (!config.tls_cert.empty()) {
    const TlsFiles files{config.tls_cert, config.tls_key, config.tls_client_ca};
    std::vector<std::string> paths = {files.cert, files.key};
    if (!files.ca.empty()) paths.push_back(files.ca);
    add(metrics.certificates, std::move(paths), [this, files] {
      return std::pair<std::string_view, Log::Value>("ends", use_certificates(files));
    });
    use_certificates(files);
  }
  if (!config.auth_token_file.empty()) {
    const std::string path = config.auth_token_file;
    authorizer_ = std::make_unique<Authorizer>(path, metrics, clock);
    warn_if_readable(path, log_);
    add(metrics.tokens, {path}, [this, path] {
      const auto tokens = static_cast<std::int64_t>(authorizer_->read_again());
      warn_if_readable(path, log_);
      return std::pair<std::string_view, Log::Value>("tokens", tokens);
    });
  }
}

// Returns when the certificate ends, as text.
std::string Security::use_certificates(const TlsFiles& files) {
  warn_if_readable(files.key, log_);
  TlsSetup grpc = make_server_tls(files, "h2");
  TlsSetup http = make_server_tls(files, "http/1.1");
  const std::time_t ends = std::chrono::system_clock::to_time_t(grpc.ends);
  metrics_.certificate_ends = static_cast<double>(ends);
  if (grpc_tls_ == nullptr) {
    grpc_tls_ = std::make_unique<http2::ServerTls>(std::move(grpc.context));
    http_tls_ = std::make_unique<http2::ServerTls>(std::move(http.context));
  } else {
    grpc_tls_->replace(std::move(grpc.context));
    http_tls_->replace(std::move(http.context));
  }
  std::tm parts{};
  ::gmtime_r(&ends, &parts);
  std::ostringstream told;
  told << std::put_time(&parts, "%Y-%m-%dT%H:%M:%SZ");
  return told.str();
}

std::optional<HttpAnswer> Security::refusal(const HttpHead& head) const {
  if (authorizer_ == nullptr || is_probe(head.path)) return std::nullopt;
  const Status status = authorizer_->admit(head.authorization);
  if (status.ok()) return std::nullopt;
  return json_refusal(http_status_of(status.code), status.message);
}

void Security::look() {
  const MutexLock lock(mutex_);
  for (Watched& one : watched_) {
    if (one.watch.changed()) read(one);
  }
}

void Security::read_again() {
  const MutexLock lock(mutex_);
  for (Watched& one : watched_) {
    one.watch.forget();
    read(one);
  }
}

void Security::add(SecretReloads& counts, std::vector<std::string> paths,
                   std::function<std::pair<std::string_view, Log::Value>()> read) {
  counts.watched = true;
  watched_.push_back({counts, FileWatch(std::move(paths)), std::move(read)});
}

void Security::read(const Watched& one) {
  const std::string kind(one.counts.files);
  try {
    const auto told = one.read();
    one.counts.taken.fetch_add(1);
    log_.info(kind + "_reloaded", {told});
  } catch (const UsageError& error) {
    one.counts.refused.fetch_add(1);
    log_.warning(kind + "_not_reloaded", {{"error", std::string(error.what())}});
  }
}

}  // namespace tessera
