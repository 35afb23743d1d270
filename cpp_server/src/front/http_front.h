// The HTTP port: /metrics, /healthz, /readyz and the status page /. One thread, one answer per
// connection, bounded connections and sizes, a time limit for slow clients.
//
// Contract: the constructor listens and starts the thread, the destructor ends it; the page
// functions are called on that thread and must outlive it.
#pragma once

#include <functional>
#include <string>
#include <thread>

#include "front/socket.h"

namespace tessera {

struct HttpAnswer {
  int status = 200;
  std::string content_type = "text/plain; charset=utf-8";
  std::string body;
};

class HttpFront {
 public:
  // `answer` gives the page of a path. `tick` is called about once a second.
  // Throws UsageError when the address cannot be had.
  HttpFront(const std::string& host, int port,
            std::function<HttpAnswer(const std::string& path)> answer, std::function<void()> tick);
  ~HttpFront();
  HttpFront(const HttpFront&) = delete;
  HttpFront& operator=(const HttpFront&) = delete;

  int port() const { return socket_.port(); }

 private:
  void run();

  ListeningSocket socket_;
  std::function<HttpAnswer(const std::string&)> answer_;
  std::function<void()> tick_;
  int wake_ = -1;  // an eventfd: written to end the thread
  std::thread thread_;
};

// What an HTTP client that sent `head` (everything up to the empty line) is answered with.
std::string http_response(const std::string& head,
                          const std::function<HttpAnswer(const std::string&)>& answer);

}  // namespace tessera
