// HTTP/1.1 as far as the HTTP port needs it: whole requests in, whole responses out.
//
// Contract: plain values and free functions without state; any thread.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <variant>

#include "front/host_rule.h"

namespace tessera {

struct HttpAnswer {
  int status = 200;
  std::string content_type = "text/plain; charset=utf-8";
  std::string body = {};
  // How many bytes of a body with binary data behind its JSON are the JSON.
  std::optional<std::size_t> json_bytes = {};
  std::string policy = {};          // Content-Security-Policy; empty: none is sent
  std::string request_id = {};      // printable ASCII; empty: the answer has none
  std::shared_ptr<void> held = {};  // let go when the answer has left, or never will
};

// An answer in JSON; `why` is put into {"error": ...}.
HttpAnswer json_refusal(int status, const std::string& why);

struct HttpHead;
// Refuses a request by its head; nothing: it may be answered.
using RefusalFunction = std::function<std::optional<HttpAnswer>(const HttpHead& head)>;

// Gives the page of a path.
using PageFunction = std::function<HttpAnswer(const std::string& path)>;

// The body that a POST about repositories may have.
inline constexpr std::size_t kMaxBodyBytes = 64 * 1024;

// What a request's head says.
struct HttpHead {
  enum class Method { kGet, kHead, kPost };
  Method method = Method::kGet;
  std::string path;              // without what follows a '?'
  std::size_t body_bytes = 0;    // of a POST
  bool keeps_alive = true;       // the connection is for more requests
  bool awaits_continue = false;  // the body comes once it is asked for
  std::string encoding;          // Content-Encoding; empty: none
  std::string json_bytes;        // Inference-Header-Content-Length
  std::string request_id;        // X-Request-Id
  std::string traceparent;
  std::string authorization;  // of every request
};

// Reads `head`, everything up to the empty line; or the answer that refuses it. A POST with an
// Origin is refused: a web page has sent it, on behalf of whoever looks at it. Only the server's
// own status page may ask for scores. A page that a browser asks for by a name that `hosts` does
// not know is refused where it covers pages; probes tell nothing and stay open.
std::variant<HttpHead, HttpAnswer> parse_head(const std::string& head, const HostRule& hosts = {});

// Paths that tell only whether the server lives and is ready.
bool is_probe(std::string_view path);

// A POST that has come whole.
struct HttpRequest {
  HttpHead head;
  std::string body;
  std::string peer;            // the client's IP address
  std::shared_ptr<void> held;  // let go when nobody looks at the body any more
};

// What a POST has begun, which its client may give up. `cancel` is called on the loop's thread.
class HttpCall {
 public:
  virtual ~HttpCall() = default;
  virtual void cancel() = 0;
};

// Answers a POST by calling `done` once, from any thread, perhaps before it returns. May give what
// can be given up, or null.
using HttpDone = std::function<void(HttpAnswer answer)>;
using PostFunction = std::function<std::shared_ptr<HttpCall>(HttpRequest request, HttpDone done)>;

// The bytes of a response; without its body where that was not asked for.
std::string http_response(const HttpAnswer& answer, bool with_body = true,
                          bool keeps_alive = false);

}  // namespace tessera
