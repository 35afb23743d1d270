#include "front/http_page.h"

#include <sstream>

#include "common/text.h"

namespace tessera {
namespace {

const char* reason_phrase(int status) {
  switch (status) {
    case 200: return "OK";
    case 400: return "Bad Request";
    case 404: return "Not Found";
    case 405: return "Method Not Allowed";
    case 503: return "Service Unavailable";
    default: return "Error";
  }
}

std::string rendered(const HttpAnswer& answer, bool with_body) {
  return text("HTTP/1.1 ", answer.status, " ", reason_phrase(answer.status),
              "\r\nContent-Type: ", answer.content_type, "\r\nContent-Length: ", answer.body.size(),
              "\r\nConnection: close\r\n\r\n", with_body ? answer.body : "");
}

}  // namespace

std::string http_refusal(int status, const std::string& why) {
  return rendered({.status = status, .body = why}, true);
}

std::string http_response(const std::string& head, const PageFunction& answer) {
  std::istringstream words(head.substr(0, head.find("\r\n")));
  std::string method;
  std::string target;
  std::string protocol;
  words >> method >> target >> protocol;
  if (!protocol.starts_with("HTTP/1.") || !target.starts_with('/')) {
    return http_refusal(400, "this is not an HTTP/1.1 request\n");
  }
  if (method != "GET" && method != "HEAD") return http_refusal(405, "only GET and HEAD\n");
  return rendered(answer(target.substr(0, target.find('?'))), method == "GET");
}

}  // namespace tessera
