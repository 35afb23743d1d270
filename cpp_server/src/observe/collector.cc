#include "observe/collector.h"

#include <algorithm>
#include <array>
#include <optional>
#include <set>

#include "common/flags.h"
#include "common/text.h"
#include "common/whole_number.h"
#include "repository/small_file.h"

namespace tessera {
namespace {

constexpr std::string_view kScheme = "http://";
constexpr std::string_view kTlsScheme = "https://";
constexpr std::string_view kDefaultPort = "4318";
constexpr std::string_view kTlsPort = "443";
constexpr std::string_view kTracesPath = "/v1/traces";
constexpr int kMostPort = 65'535;
constexpr std::size_t kMaxHeadersBytes = 16 * 1024;
// What a request has anyhow, in lower case.
constexpr std::array<std::string_view, 6> kOwnHeaders = {
    "connection", "content-length", "content-type", "host", "transfer-encoding", "user-agent"};

std::string lower_case(std::string_view given) {
  std::string lower(given);
  for (char& c : lower) {
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  }
  return lower;
}

// `given` without the spaces, tabs and carriage returns around it.
std::string_view stripped(std::string_view given) {
  const std::size_t begin = given.find_first_not_of(" \t\r");
  if (begin == std::string_view::npos) return {};
  return given.substr(begin, given.find_last_not_of(" \t\r") + 1 - begin);
}

bool is_header_name(std::string_view name) {
  constexpr std::string_view kMarks = "!#$%&'*+-.^_`|~";
  const auto fits = [&](char c) {
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
           kMarks.find(c) != std::string_view::npos;
  };
  return !name.empty() && std::all_of(name.begin(), name.end(), fits);
}

}  // namespace

Collector read_collector(const std::string& url) {
  const auto refuse = [&] {
    refuse_flag("otlp-endpoint", "'" + url + "'",
                "give http://HOST:PORT or https://HOST:PORT of a collector that takes OTLP over "
                "HTTP, such as http://127.0.0.1:4318");
  };
  const bool plain =
      std::all_of(url.begin(), url.end(), [](char c) { return c > ' ' && c <= '~'; });
  const bool encrypted = url.starts_with(kTlsScheme);
  if ((!url.starts_with(kScheme) && !encrypted) || !plain ||
      url.find_first_of("@?#\\") != std::string::npos) {
    refuse();
  }
  Collector collector{.url = url, .encrypted = encrypted};
  const std::string rest = url.substr(encrypted ? kTlsScheme.size() : kScheme.size());
  const std::size_t slash = std::min(rest.find('/'), rest.size());
  collector.authority = rest.substr(0, slash);
  collector.path = rest.substr(slash);
  while (collector.path.ends_with('/')) collector.path.pop_back();
  collector.path += kTracesPath;
  std::string host = collector.authority;
  const std::size_t bracket = host.rfind(']');
  const std::size_t colon = host.rfind(':');
  collector.port = encrypted ? kTlsPort : kDefaultPort;
  if (colon != std::string::npos && (bracket == std::string::npos || colon > bracket)) {
    collector.port = host.substr(colon + 1);
    host.resize(colon);
  }
  if (host.starts_with('[') && host.ends_with(']')) host = host.substr(1, host.size() - 2);
  const auto port = whole_number(collector.port);
  if (host.empty() || host.find_first_of("[]") != std::string::npos ||
      (host.find(':') != std::string::npos && bracket == std::string::npos) || !port.has_value() ||
      *port < 1 || *port > kMostPort) {
    refuse();
  }
  collector.host = host;
  return collector;
}

std::string parse_collector_headers(std::string_view content) {
  std::string headers;
  std::set<std::string> names;
  for (std::size_t number = 1; !content.empty(); ++number) {
    const std::size_t end = std::min(content.find('\n'), content.size());
    const std::string_view line = stripped(content.substr(0, end));
    content.remove_prefix(std::min(end + 1, content.size()));
    if (line.empty() || line.front() == '#') continue;
    const std::size_t colon = line.find(':');
    const std::string_view name = line.substr(0, std::min(colon, line.size()));
    const std::string_view value =
        colon == std::string_view::npos ? std::string_view() : stripped(line.substr(colon + 1));
    if (!is_header_name(name) || value.empty()) {
      throw UsageError(text("line ", number, " is not a header; write NAME: VALUE"));
    }
    if (!std::all_of(value.begin(), value.end(), [](char c) { return c >= ' ' && c <= '~'; })) {
      throw UsageError(text("line ", number, " has a value that is not printable ASCII"));
    }
    const std::string lower = lower_case(name);
    if (std::find(kOwnHeaders.begin(), kOwnHeaders.end(), lower) != kOwnHeaders.end()) {
      throw UsageError(text("line ", number, " gives the header '", lower,
                            "', which every request has anyhow; leave it out"));
    }
    if (!names.insert(lower).second) {
      throw UsageError(text("line ", number, " gives the header '", lower, "' again"));
    }
    headers.append(name).append(": ").append(value).append("\r\n");
  }
  if (headers.empty()) throw UsageError("it holds no header; write NAME: VALUE on a line");
  return headers;
}

std::string read_collector_headers(const std::string& path) {
  const auto content = read_small_file(path, kMaxHeadersBytes);
  if (!content.has_value()) throw UsageError(path + ": there is no such file");
  try {
    return parse_collector_headers(*content);
  } catch (const UsageError& error) {
    throw UsageError(text(path, ": ", error.what()));
  }
}

}  // namespace tessera
