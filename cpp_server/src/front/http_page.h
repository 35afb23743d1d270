// HTTP/1.1 as far as the HTTP port needs it: one request in, one whole response out.
//
// Contract: plain values and free functions without state; any thread.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <variant>

namespace tessera {

struct HttpAnswer {
  int status = 200;
  std::string content_type = "text/plain; charset=utf-8";
  std::string body = {};
};

// An answer in JSON; `why` is put into {"error": ...}.
HttpAnswer json_refusal(int status, const std::string& why);

// Gives the page of a path.
using PageFunction = std::function<HttpAnswer(const std::string& path)>;

// Answers a POST to `path` by calling `done` once, from any thread, perhaps before it returns.
using HttpDone = std::function<void(HttpAnswer answer)>;
using PostFunction =
    std::function<void(const std::string& path, const std::string& body, HttpDone done)>;

// The body that a POST may have.
inline constexpr std::size_t kMaxBodyBytes = 64 * 1024;

// What a request's head says.
struct HttpHead {
  enum class Method { kGet, kHead, kPost };
  Method method = Method::kGet;
  std::string path;            // without what follows a '?'
  std::size_t body_bytes = 0;  // of a POST; at most kMaxBodyBytes
};

// Reads `head`, everything up to the empty line; or the answer that refuses it. A POST with an
// Origin is refused: a web page has sent it, on behalf of whoever looks at it.
std::variant<HttpHead, HttpAnswer> parse_head(const std::string& head);

// The bytes of a response; without its body where that was not asked for.
std::string http_response(const HttpAnswer& answer, bool with_body = true);

}  // namespace tessera
