#include "front/http_front.h"

#include <poll.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <system_error>
#include <utility>
#include <vector>

#include "common/mutex.h"
#include "common/thread_name.h"

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

// Answers of POSTs on their way from any thread to the loop's.
class HttpFront::LateAnswers : public http2::EventLoop::Task {
 public:
  explicit LateAnswers(HttpFront& front) : front_(&front) {}

  // Any thread.
  void give(std::uint64_t number, HttpAnswer answer) {
    const MutexLock lock(mutex_);
    if (front_ == nullptr) return;
    answers_.emplace_back(number, std::move(answer));
    if (answers_.size() == 1) front_->loop_.post(*this);
  }

  // What comes from now on is dropped.
  void close() {
    const MutexLock lock(mutex_);
    front_ = nullptr;
  }

 private:
  void run() override {
    std::vector<std::pair<std::uint64_t, HttpAnswer>> answers;
    HttpFront* front = nullptr;
    {
      const MutexLock lock(mutex_);
      answers.swap(answers_);
      front = front_;
    }
    if (front == nullptr) return;
    for (auto& [number, answer] : answers) {
      const auto asked =
          std::find_if(front->connections_.begin(), front->connections_.end(),
                       [wanted = number](const auto& one) { return one->number() == wanted; });
      if (asked != front->connections_.end()) (*asked)->give(std::move(answer));
    }
  }

  Mutex mutex_;
  HttpFront* front_ TESSERA_GUARDED_BY(mutex_);
  std::vector<std::pair<std::uint64_t, HttpAnswer>> answers_ TESSERA_GUARDED_BY(mutex_);
};

HttpFront::HttpFront(const HttpOptions& options, PageFunction page, PostFunction post,
                     std::function<void()> tick, const Log& log)
    : options_(options),
      page_(std::move(page)),
      post_(std::move(post)),
      tick_(std::move(tick)),
      log_(log),
      bodies_(options.max_bodies_bytes),
      socket_(options.host, options.port, "HTTP", "--http-port"),
      second_([this] { second_passed(); }),
      accept_again_([this] { loop_.change(socket_.descriptor(), EPOLLIN, *this); }),
      late_answers_(std::make_shared<LateAnswers>(*this)) {
  if (!loop_.add(socket_.descriptor(), EPOLLIN, *this)) {
    throw std::system_error(errno, std::generic_category(), "epoll");
  }
  loop_.schedule(second_, loop_.now() + kTick);
  thread_ = std::thread([this] {
    name_thread("http-loop");
    loop_.run();
  });
}

HttpFront::~HttpFront() {
  late_answers_->close();
  loop_.stop();
  thread_.join();
}

std::optional<std::size_t> HttpFront::most_body_bytes(const std::string& path) {
  if (post_ == nullptr) return std::nullopt;
  return options_.most_body_bytes(path);
}

std::shared_ptr<HttpCall> HttpFront::post(std::uint64_t number, HttpRequest request) {
  return post_(std::move(request), [late = late_answers_, number](HttpAnswer answer) {
    late->give(number, std::move(answer));
  });
}

void HttpFront::second_passed() {
  try {
    tick_();
  } catch (const std::bad_alloc&) {  // the next second may have the memory
  }
  spare_.take();
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
    if (no_room(error)) return make_room(error);
    // A client that has gone again is none; the next one may be there.
    return error == EINTR || error == ECONNABORTED;
  }
  http2::Socket socket(accepted);
  try {
    if (options_.tls != nullptr) {
      socket.start_tls(options_.tls->current(), http2::TlsSession::Role::kServer);
    }
    if (connections_.size() >= static_cast<std::size_t>(options_.max_connections)) close_oldest();
    const auto place = connections_.insert(connections_.end(), nullptr);
    try {
      HttpAnswers& answers = *this;
      *place = std::make_unique<HttpConnection>(++accepted_, loop_, std::move(socket), answers,
                                                options_.times,
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

bool HttpFront::make_room(int error) {
  // accept4 fails where there is no descriptor, also if no client waits.
  pollfd waiting{.fd = socket_.descriptor(), .events = POLLIN, .revents = 0};
  if (::poll(&waiting, 1, 0) == 0) return false;
  if (connections_.empty() && (error == EMFILE || error == ENFILE) && spare_.give()) return true;
  stop_accepting(error);
  return false;
}

void HttpFront::stop_accepting(int error) {
  log_.client_warning("http_accept_failed", {{"error", std::string(std::strerror(error))}});
  close_oldest();
  loop_.change(socket_.descriptor(), 0, *this);
  loop_.schedule(accept_again_, loop_.now() + kRetry);
}

}  // namespace tessera
