#include "front/http_page.h"

#include <algorithm>
#include <charconv>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <sstream>
#include <string_view>

#include "common/text.h"

namespace tessera {
namespace {

const char* reason_phrase(int status) {
  switch (status) {
    case 200: return "OK";
    case 400: return "Bad Request";
    case 401: return "Unauthorized";
    case 403: return "Forbidden";
    case 404: return "Not Found";
    case 405: return "Method Not Allowed";
    case 409: return "Conflict";
    case 411: return "Length Required";
    case 413: return "Content Too Large";
    case 429: return "Too Many Requests";
    case 499: return "Client Closed Request";
    case 500: return "Internal Server Error";
    case 503: return "Service Unavailable";
    case 504: return "Gateway Timeout";
    default: return "Error";
  }
}

constexpr std::string_view kLineEnd = "\r\n";

bool same_word(std::string_view a, std::string_view lower) {
  return std::equal(a.begin(), a.end(), lower.begin(), lower.end(), [](char x, char y) {
    return (x >= 'A' && x <= 'Z' ? static_cast<char>(x - 'A' + 'a') : x) == y;
  });
}

// Goes to the next line of `head`, and gives it; nothing: there is none.
std::optional<std::string_view> next_line(std::string_view& head) {
  const auto end = head.find(kLineEnd);
  if (end == std::string_view::npos) return std::nullopt;
  head.remove_prefix(end + kLineEnd.size());
  return head.substr(0, head.find(kLineEnd));
}

// The value of the header `name`, which is lower-case, in `head`; nothing: it has none.
std::optional<std::string_view> header(std::string_view head, std::string_view name) {
  while (const auto line = next_line(head)) {
    const auto colon = line->find(':');
    if (colon == std::string_view::npos || !same_word(line->substr(0, colon), name)) continue;
    std::string_view value = line->substr(colon + 1);
    while (!value.empty() && (value.front() == ' ' || value.front() == '\t'))
      value.remove_prefix(1);
    while (!value.empty() && (value.back() == ' ' || value.back() == '\t')) value.remove_suffix(1);
    return value;
  }
  return std::nullopt;
}

// A character of a header's name, as RFC 9110 has them.
bool in_name(char c) {
  return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') ||
         (c != '\0' && std::string_view("!#$%&'*+-.^_`|~").find(c) != std::string_view::npos);
}

// A character that a line of a head may hold, in a value the tab, too.
bool printable(char c) {
  const auto code = static_cast<unsigned char>(c);
  return code >= 0x20 && code != 0x7F;
}

// Whether the lines of `head` are those of RFC 9112, and say once at most how long the body is. A
// proxy before the server may read other lines in another way, and pass on the rest of a body as
// the next request of another client.
bool well_formed(std::string_view head) {
  const std::string_view first = head.substr(0, head.find(kLineEnd));
  if (!std::all_of(first.begin(), first.end(), printable)) return false;
  int lengths = 0;
  while (const auto line = next_line(head)) {
    const auto colon = line->find(':');
    if (colon == std::string_view::npos || colon == 0) return false;
    const std::string_view name = line->substr(0, colon);
    const std::string_view value = line->substr(colon + 1);
    if (!std::all_of(name.begin(), name.end(), in_name) ||
        !std::all_of(value.begin(), value.end(),
                     [](char c) { return c == '\t' || printable(c); })) {
      return false;
    }
    lengths += same_word(name, "content-length") || same_word(name, "transfer-encoding") ? 1 : 0;
  }
  return lengths <= 1;
}

// Whether a body follows `head`, as it says.
bool announces_body(std::string_view head) {
  return header(head, "transfer-encoding").has_value() ||
         header(head, "content-length").value_or("0") != "0";
}

// Whether the connection is for more requests, as its headers and HTTP's version say.
bool keeps_alive(std::string_view head, std::string_view protocol) {
  const std::string_view said = header(head, "connection").value_or("");
  return protocol == "HTTP/1.0" ? same_word(said, "keep-alive") : !same_word(said, "close");
}

bool asks_for_scores(std::string_view path) {
  return path.starts_with("/v2/models/") && path.ends_with("/infer");
}

// Whether the request was sent by a page that this server has given: its Origin is where the
// request went to.
bool is_from_own_page(std::string_view head, std::string_view origin, const HostRule& hosts) {
  constexpr std::string_view kPlain = "http://";
  constexpr std::string_view kTls = "https://";  // a rebound name has no certificate
  const std::string_view host = header(head, "host").value_or("");
  if (host.empty()) return false;
  if (origin.starts_with(kTls)) return origin.substr(kTls.size()) == host;
  return origin.starts_with(kPlain) && origin.substr(kPlain.size()) == host && hosts.knows(host);
}

// Whether a browser has sent the request. A page can neither remove Accept-Language, which every
// browser sends, nor set most of the others; programs send none of them.
bool is_from_browser(std::string_view head) {
  for (const std::string_view name :
       {"accept-language", "origin", "referer", "cookie", "sec-fetch-site", "sec-fetch-mode"}) {
    if (header(head, name)) return true;
  }
  return header(head, "user-agent").value_or("").starts_with("Mozilla/");
}

// What the headers of a POST to `path` say of its body, in `bytes`; or the answer that refuses it.
std::optional<HttpAnswer> read_body_size(std::string_view head, const std::string& path,
                                         const HostRule& hosts, std::size_t& bytes) {
  const auto origin = header(head, "origin");
  if (origin && !(asks_for_scores(path) && is_from_own_page(head, *origin, hosts))) {
    return json_refusal(403, "a request with an Origin comes from a web page, and is not heard");
  }
  if (header(head, "transfer-encoding")) {
    return json_refusal(411, "send the body as a whole, with its Content-Length");
  }
  const std::string_view length = header(head, "content-length").value_or("0");
  const auto [stopped, error] =
      std::from_chars(length.data(), length.data() + length.size(), bytes);
  const bool number = stopped == length.data() + length.size() && !length.empty();
  if (!number || error == std::errc::invalid_argument) {
    return json_refusal(400, "Content-Length is not a number");
  }
  if (error != std::errc()) bytes = std::numeric_limits<std::size_t>::max();
  return std::nullopt;
}

}  // namespace

bool is_probe(std::string_view path) {
  return path == "/healthz" || path == "/readyz" || path == "/v2/health/live" ||
         path == "/v2/health/ready";
}

HttpAnswer json_refusal(int status, const std::string& why) {
  const nlohmann::json json{{"error", why}};
  return {.status = status,
          .content_type = "application/json",
          .body = json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n"};
}

std::variant<HttpHead, HttpAnswer> parse_head(const std::string& head, const HostRule& hosts) {
  std::istringstream words(head.substr(0, head.find(kLineEnd)));
  std::string method;
  std::string target;
  std::string protocol;
  words >> method >> target >> protocol;
  if (!protocol.starts_with("HTTP/1.") || !target.starts_with('/') || !well_formed(head)) {
    return HttpAnswer{.status = 400, .body = "this is not an HTTP/1.1 request\n"};
  }
  HttpHead parsed;
  parsed.path = target.substr(0, target.find('?'));
  parsed.keeps_alive = keeps_alive(head, protocol);
  parsed.authorization = header(head, "authorization").value_or("");
  if (method == "GET" || method == "HEAD") {
    parsed.method = method == "GET" ? HttpHead::Method::kGet : HttpHead::Method::kHead;
    // Nobody reads a body here, so what follows the head is not a request.
    parsed.keeps_alive = parsed.keeps_alive && !announces_body(head);
    if (hosts.covers_pages() && !is_probe(parsed.path) &&
        !hosts.knows(header(head, "host").value_or("")) && is_from_browser(head)) {
      return json_refusal(403,
                          "the request's Host is not a name of this server; a browser has to ask "
                          "by an IP address, by localhost, or by a name of --allowed-host");
    }
    return parsed;
  }
  if (method != "POST") return json_refusal(405, "only GET, HEAD and POST");
  parsed.method = HttpHead::Method::kPost;
  if (auto refusal = read_body_size(head, parsed.path, hosts, parsed.body_bytes)) return *refusal;
  parsed.awaits_continue = same_word(header(head, "expect").value_or(""), "100-continue");
  parsed.encoding = header(head, "content-encoding").value_or("");
  parsed.json_bytes = header(head, "inference-header-content-length").value_or("");
  parsed.request_id = header(head, "x-request-id").value_or("");
  parsed.traceparent = header(head, "traceparent").value_or("");
  return parsed;
}

std::string http_response(const HttpAnswer& answer, bool with_body, bool keeps_alive) {
  std::string response =
      text("HTTP/1.1 ", answer.status, " ", reason_phrase(answer.status),
           "\r\nContent-Type: ", answer.content_type, "\r\nContent-Length: ", answer.body.size());
  if (answer.json_bytes.has_value()) {
    response += text("\r\nInference-Header-Content-Length: ", *answer.json_bytes);
  }
  if (!answer.request_id.empty()) response += "\r\nX-Request-Id: " + answer.request_id;
  if (!answer.policy.empty()) response += "\r\nContent-Security-Policy: " + answer.policy;
  if (answer.status == 401) response += "\r\nWWW-Authenticate: Bearer";
  response += keeps_alive ? "\r\nConnection: keep-alive\r\n\r\n" : "\r\nConnection: close\r\n\r\n";
  if (with_body) response += answer.body;
  return response;
}

}  // namespace tessera
