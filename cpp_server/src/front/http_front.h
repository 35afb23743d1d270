// The HTTP port: /metrics, /healthz, /readyz, the status page /, and below /v2 REST. One thread
// moves all bytes; what takes longer than a page belongs to whoever answers a POST.
//
// A probe is answered however many others hold connections: there are at most so many, and where a
// new one finds no room, the oldest without a complete request is closed in its favour (it is idle
// or slow; who sends a request at once is older for a moment only). Each has a time for its first
// byte, for its request, and for the answer to be read. Where the system has no descriptor for a
// new client, the oldest is closed as well, and the client is asked for again a moment later; where
// there is no other, the client has a spare one.
//
// Contract: the constructor listens and starts the thread, the destructor ends it; the page
// functions are called on that thread and must outlive it. What a POST is answered with may come
// from any thread, also after the front has ended, and is dropped then.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <optional>
#include <string>
#include <thread>

#include "front/http_connection.h"
#include "front/socket.h"
#include "http2/event_loop.h"
#include "http2/server_tls.h"
#include "http2/spare_descriptor.h"
#include "server/log.h"

namespace tessera {

struct HttpOptions {
  std::string host;
  int port = 0;  // 0: any free one
  int max_connections = 128;
  std::int64_t max_bodies_bytes = 64 * 1024 * 1024;  // of bodies that come or are being read
  // The body that a POST to a path may have.
  std::function<std::size_t(const std::string& path)> most_body_bytes = [](const std::string&) {
    return kMaxBodyBytes;
  };
  HttpTimes times{};
  const http2::ServerTls* tls = nullptr;  // outlives the front; null: nothing is encrypted
  HostRule hosts{};                       // by which names browsers may ask
  // Asked first, and called as the page functions are.
  RefusalFunction refusal = [](const HttpHead&) { return std::nullopt; };
};

class HttpFront : private http2::EventLoop::Handler, private HttpAnswers {
 public:
  // `page` gives the page of a path, `post` answers a POST (null: there is none). `tick` is called
  // about once a second. `log`, which hears of clients that could not be accepted, must outlive the
  // front. Throws UsageError when the address cannot be had.
  HttpFront(const HttpOptions& options, PageFunction page, PostFunction post,
            std::function<void()> tick, const Log& log);
  ~HttpFront() override;
  HttpFront(const HttpFront&) = delete;
  HttpFront& operator=(const HttpFront&) = delete;

  int port() const { return socket_.port(); }

  // Connections end with their next answer from now on. Any thread.
  void announce_end() { ending_.store(true, std::memory_order_relaxed); }

 private:
  using Connections = std::list<std::unique_ptr<HttpConnection>>;
  class LateAnswers;

  // HttpAnswers
  std::optional<HttpAnswer> refusal(const HttpHead& head) override {
    return options_.refusal(head);
  }
  HttpAnswer page(const std::string& path) override { return page_(path); }
  std::optional<std::size_t> most_body_bytes(const std::string& path) override;
  std::shared_ptr<HttpCall> post(std::uint64_t number, HttpRequest request) override;
  ByteBudget& bodies() override { return bodies_; }
  const HostRule& hosts() const override { return options_.hosts; }
  bool ending() const override { return ending_.load(std::memory_order_relaxed); }

  void on_ready(std::uint32_t events) override;
  // Lets one client in; false: there is none, or no room for it.
  bool accept_one();
  void close_oldest();
  // Makes room for whoever waits after `error` of accept; true: there is some.
  bool make_room(int error);
  void stop_accepting(int error);
  void second_passed();

  const HttpOptions options_;
  const PageFunction page_;
  const PostFunction post_;
  const std::function<void()> tick_;
  const Log& log_;
  ByteBudget bodies_;
  std::atomic<bool> ending_ = false;
  ListeningSocket socket_;
  http2::EventLoop loop_;
  http2::EventLoop::Timer second_;
  http2::EventLoop::Timer accept_again_;
  Connections connections_;  // the oldest first
  http2::SpareDescriptor spare_;
  std::uint64_t accepted_ = 0;
  std::shared_ptr<LateAnswers> late_answers_;
  std::thread thread_;
};

}  // namespace tessera
