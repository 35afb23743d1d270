#include "front/http_front.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <system_error>
#include <utility>

namespace tessera {
namespace {

constexpr Duration kTick = std::chrono::seconds(1);
constexpr Duration kRetry = std::chrono::milliseconds(100);
// Clients that one turn of the loop lets in: those that are there have their turn, too.
constexpr int kAcceptsPerTurn = 64;

// Whether accept4 failed for a reason that lasts: its client stays in the kernel's queue, and epoll
// would name it again at once.
bool no_room(int error) {
  return error == EMFILE || error == ENFILE || error == ENOBUFS || error == ENOMEM;
}

}  // namespace

HttpFront::HttpFront(const HttpOptions& options, PageFunction answer, std::function<void()> tick,
                     const Log& log)
    : options_(options),
      answer_(std::move(answer)),
      tick_(std::move(tick)),
      log_(log),
      socket_(options.host, options.port, "HTTP", "--http-port"),
      second_([this] { second_passed(); }),
      accept_again_([this] { loop_.change(socket_.descriptor(), EPOLLIN, *this); }) {
  if (!loop_.add(socket_.descriptor(), EPOLLIN, *this)) {
    throw std::system_error(errno, std::generic_category(), "epoll");
  }
  loop_.schedule(second_, loop_.now() + kTick);
  thread_ = std::thread([this] { loop_.run(); });
}

HttpFront::~HttpFront() {
  loop_.stop();
  thread_.join();
}

void HttpFront::second_passed() {
  try {
    tick_();
  } catch (const std::bad_alloc&) {  // the next second may have the memory
  }
  loop_.schedule(second_, loop_.now() + kTick);
}

void HttpFront::on_ready(std::uint32_t /*events*/) {
  for (int i = 0; i < kAcceptsPerTurn && accept_one(); ++i) {
  }
}

bool HttpFront::accept_one() {
  const int accepted =
      ::accept4(socket_.descriptor(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
  if (accepted < 0) {
    const int error = errno;
    if (no_room(error)) stop_accepting(error);
    // A client that has gone again is none; the next one may be there.
    return error == EINTR || error == ECONNABORTED;
  }
  http2::Socket socket(accepted);
  try {
    if (connections_.size() >= static_cast<std::size_t>(options_.max_connections)) close_oldest();
    const auto place = connections_.insert(connections_.end(), nullptr);
    try {
      *place = std::make_unique<HttpConnection>(loop_, std::move(socket), answer_, options_.times,
                                                [this, place] { connections_.erase(place); });
    } catch (const std::bad_alloc&) {
      connections_.erase(place);
      throw;
    }
    // Most requests come with their connection.
    (*place)->on_ready(EPOLLIN);
    return true;
  } catch (const std::bad_alloc&) {
    stop_accepting(ENOMEM);
    return false;
  }
}

void HttpFront::close_oldest() {
  const auto unfinished = std::find_if(connections_.begin(), connections_.end(),
                                       [](const auto& one) { return !one->has_request(); });
  if (!connections_.empty()) {
    connections_.erase(unfinished != connections_.end() ? unfinished : connections_.begin());
  }
}

void HttpFront::stop_accepting(int error) {
  log_.client_warning("http_accept_failed", {{"error", std::string(std::strerror(error))}});
  close_oldest();
  loop_.change(socket_.descriptor(), 0, *this);
  loop_.schedule(accept_again_, loop_.now() + kRetry);
}

}  // namespace tessera
