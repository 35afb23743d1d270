// HTTP/1.1 as far as the HTTP port needs it: one request's head in, one whole response out.
//
// Contract: free functions without state; any thread.
#pragma once

#include <functional>
#include <string>

namespace tessera {

struct HttpAnswer {
  int status = 200;
  std::string content_type = "text/plain; charset=utf-8";
  std::string body;
};

// Gives the page of a path.
using PageFunction = std::function<HttpAnswer(const std::string& path)>;

// What an HTTP client that sent `head` (everything up to the empty line) is answered with.
std::string http_response(const std::string& head, const PageFunction& answer);

// A response of `status` whose body is `why`.
std::string http_refusal(int status, const std::string& why);

}  // namespace tessera
