#include "front/host_rule.h"

#include <algorithm>

#include "common/flags.h"
#include "common/text.h"

namespace tessera {
namespace {

constexpr std::string_view kAny = "*";
constexpr std::size_t kMostNameBytes = 253;  // of a name in the DNS
constexpr std::string_view kLocal = "localhost";

std::string normal(std::string_view name) {
  if (name.ends_with('.')) name.remove_suffix(1);
  std::string lower(name);
  for (char& c : lower) {
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  }
  return lower;
}

bool is_local(std::string_view name) {
  return name == kLocal || (name.ends_with(kLocal) && name[name.size() - kLocal.size() - 1] == '.');
}

bool in_host_name(char c) {
  return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '-' || c == '_' || c == '.';
}

// Whether nobody but this machine reaches a port that listens on `host`.
bool is_loopback(std::string_view host) {
  return host.starts_with("127.") || host == "::1" || is_local(normal(host));
}

}  // namespace

std::string checked_host_name(std::string_view name) {
  std::string lower = normal(name);
  const bool sound = !lower.empty() && lower.size() <= kMostNameBytes &&
                     std::all_of(lower.begin(), lower.end(), in_host_name);
  if (!sound && name != kAny) {
    refuse_flag("allowed-host", text("'", name, "'"),
                "give a host's name without scheme and port, such as ranker.example.com, or *");
  }
  return lower;
}

HostRule::HostRule(const HostRuleOptions& options) : allowed_(options.allowed) {
  const bool any = std::find(allowed_.begin(), allowed_.end(), kAny) != allowed_.end();
  covers_pages_ =
      !options.guarded && !any && (!allowed_.empty() || is_loopback(options.listens_on));
}

bool HostRule::knows(std::string_view host) const {
  if (host.starts_with('[')) return true;  // an address of IPv6
  const std::string name = normal(host.substr(0, host.find(':')));
  if (name.empty()) return false;
  return name.find_first_not_of("0123456789.") == name.npos || is_local(name) ||
         std::find(allowed_.begin(), allowed_.end(), name) != allowed_.end();
}

}  // namespace tessera
