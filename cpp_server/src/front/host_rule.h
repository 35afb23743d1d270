// By which names a browser may ask the HTTP port for its pages.
//
// Whoever wrote a page may make its own name stand for this machine once a browser shows it (DNS
// rebinding): to the browser this server's pages are then the page's own, and it may read them.
// What gives it away is the Host of its requests, which is the name and which no page can set. So a
// browser has to ask by an IP address, by localhost, or by a name that --allowed-host gives.
// Programs may ask by any name: they show no pages of strangers. docs/security.md tells more.
//
// Contract: a plain value that does not change; any thread.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace tessera {

// `name` as hosts are compared: lower-case, without a dot at its end. Throws UsageError, which
// names --allowed-host, where it is neither the name of a host nor *.
std::string checked_host_name(std::string_view name);

// Where a server listens and what guards it besides.
struct HostRuleOptions {
  std::string listens_on;
  std::vector<std::string> allowed;  // as checked_host_name gives them
  bool guarded = false;  // by tokens or certificates, which a rebound name does not have
};

class HostRule {
 public:
  HostRule() = default;  // knows IP addresses and localhost, and leaves pages open
  // Pages are open where the server is guarded, where * is allowed, and, if no name is given, where
  // other machines reach the port: they do so by names that only their owner knows.
  explicit HostRule(const HostRuleOptions& options);

  // Whether `host`, a header's value, is an IP address, localhost or an allowed name, with a port
  // or without.
  bool knows(std::string_view host) const;

  bool covers_pages() const { return covers_pages_; }

 private:
  std::vector<std::string> allowed_;
  bool covers_pages_ = false;
};

}  // namespace tessera
