#include "http2/server.h"

#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <exception>
#include <semaphore>
#include <thread>
#include <unordered_map>
#include <utility>

#include "common/short_slices.h"
#include "common/thread_name.h"
#include "http2/connection.h"
#include "http2/spare_descriptor.h"

namespace tessera::http2 {
namespace {

constexpr Duration kSweepEvery = std::chrono::milliseconds(250);
// Between two looks whether there is room for a connection again.
constexpr Duration kPause = std::chrono::milliseconds(20);
constexpr int kAcceptsPerTurn = 32;
// What is read in a turn of all connections together, or a little more: they wait for one another
// as long as that takes.
constexpr std::size_t kReadBytes = 256 * 1024;

// Runs once on the loop's thread, and is gone.
class Once final : public EventLoop::Task {
 public:
  static void post(EventLoop& loop, std::function<void()> action) {
    loop.post(*new Once(std::move(action)));
  }

 private:
  explicit Once(std::function<void()> action) : action_(std::move(action)) {}
  void run() override {
    const std::unique_ptr<Once> owner(this);
    action_();
  }
  std::function<void()> action_;
};

}  // namespace

// A loop with its thread and its connections.
class Server::Thread final : private ConnectionOwner, private EventLoop::Deferred {
 public:
  Thread(const Limits& limits, Counters& counters, CallGate* gate, const ServerTls* tls)
      : read_buffer_(kReadBytes),
        context_{loop_, limits, counters, methods_, *this, read_buffer_, gate},
        tls_(tls),
        sweep_([this] { sweep(); }) {}

  ~Thread() override {
    end();
    const auto left =
        std::exchange(connections_, {});  // none of which is to be told apart any more
    loop_.forget(*this);
  }

  EventLoop& loop() { return loop_; }
  MethodTable& methods() { return methods_; }
  int connections() const { return count_.load(std::memory_order_relaxed); }

  // The loop at `index` of its server.
  void start(std::size_t index) {
    loop_.schedule(sweep_, loop_.now() + kSweepEvery);
    thread_ = std::jthread([this, index] {
      name_thread("grpc-loop", index);
      take_short_slices();
      loop_.run();
    });
  }

  void end() {
    if (!thread_.joinable()) return;
    loop_.stop();
    thread_.join();
  }

  // Any thread.
  void adopt(Socket socket) {
    count_.fetch_add(1, std::memory_order_relaxed);
    auto shared = std::make_shared<Socket>(std::move(socket));
    Once::post(loop_, [this, shared] {
      try {
        if (tls_ != nullptr) shared->start_tls(tls_->current(), TlsSession::Role::kServer);
        auto made = std::make_unique<Connection>(context_, std::move(*shared));
        connections_.emplace(made.get(), std::move(made));
      } catch (const std::exception&) {  // no memory, or epoll has no room: it is closed
        count_.fetch_sub(1, std::memory_order_relaxed);
      }
    });
  }

  // Any thread: calls `action` with every connection.
  void each(void (Connection::*action)()) {
    Once::post(loop_, [this, action] { apply(action); });
  }

 private:
  void apply(void (Connection::*action)()) {
    // A connection that vanishes leaves the map only at the end of the turn.
    for (const auto& [connection, owner] : connections_) (connection->*action)();
  }

  void sweep() {
    apply(&Connection::sweep);
    loop_.schedule(sweep_, loop_.now() + kSweepEvery);
  }

  void gone(Connection& connection) override {
    if (!connections_.contains(&connection)) return;
    dead_.push_back(&connection);
    loop_.defer(*this);
  }

  void on_turn_end() override {
    for (Connection* const connection : dead_) {
      connections_.erase(connection);
      count_.fetch_sub(1, std::memory_order_relaxed);
    }
    dead_.clear();
  }

  EventLoop loop_;
  MethodTable methods_;
  std::vector<std::byte> read_buffer_;
  ConnectionContext context_;
  const ServerTls* const tls_;
  EventLoop::Timer sweep_;
  std::atomic<int> count_ = 0;
  std::unordered_map<Connection*, std::unique_ptr<Connection>> connections_;
  std::vector<Connection*> dead_;
  std::jthread thread_;
};

// Lives on the first loop.
class Server::Listener final : private EventLoop::Handler {
 public:
  Listener(int descriptor, std::vector<std::unique_ptr<Thread>>& threads, const Limits& limits,
           Counters& counters)
      : descriptor_(descriptor),
        threads_(threads),
        limits_(limits),
        counters_(counters),
        resume_([this] { listen(); }) {}

  void listen() {
    if (!loop().add(descriptor_, EPOLLIN, *this)) loop().schedule(resume_, loop().now() + kPause);
  }

  void stop() {
    loop().cancel(resume_);
    loop().remove(descriptor_, *this);
    ::shutdown(descriptor_, SHUT_RD);  // clients are refused from now on
  }

 private:
  EventLoop& loop() { return threads_.front()->loop(); }

  void on_ready(std::uint32_t /*events*/) override {
    for (int i = 0; i < kAcceptsPerTurn; ++i) {
      int open = 0;
      for (const auto& thread : threads_) open += thread->connections();
      if (open >= limits_.max_connections) {
        pause();
        return;
      }
      const int accepted = ::accept4(descriptor_, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
      if (accepted >= 0) {
        const auto fewest = std::min_element(
            threads_.begin(), threads_.end(),
            [](const auto& a, const auto& b) { return a->connections() < b->connections(); });
        (*fewest)->adopt(Socket(accepted));
        continue;
      }
      if (errno == EINTR || errno == ECONNABORTED) continue;
      if ((errno == EMFILE || errno == ENFILE) && turn_away()) continue;
      // Whoever could not be let in stays in the queue, and epoll would name it again at once.
      if (errno != EAGAIN && errno != EWOULDBLOCK) pause();
      return;
    }
  }

  // Accepts a client with the spare descriptor and closes it, so that it hears at once that there
  // is no room. False where somebody else has taken the spare one.
  bool turn_away() {
    const int accepted =
        spare_.give() ? ::accept4(descriptor_, nullptr, nullptr, SOCK_CLOEXEC) : -1;
    if (accepted >= 0) {
      counters_.note_full_of_connections(loop().now());
      counters_.count_closed(CloseReason::kNoDescriptor);
      ::close(accepted);
    }
    spare_.take();
    return accepted >= 0;
  }

  void pause() {
    counters_.note_full_of_connections(loop().now());
    loop().remove(descriptor_, *this);
    loop().schedule(resume_, loop().now() + kPause);
  }

  const int descriptor_;
  std::vector<std::unique_ptr<Thread>>& threads_;
  const Limits& limits_;
  Counters& counters_;
  SpareDescriptor spare_;
  EventLoop::Timer resume_;
};

Server::Server(const Limits& limits, Counters& counters, int loops, CallGate* gate,
               const ServerTls* tls)
    : limits_(limits), counters_(counters) {
  for (int i = 0; i < loops; ++i) {
    threads_.push_back(std::make_unique<Thread>(limits_, counters_, gate, tls));
  }
}

Server::~Server() { release(); }

EventLoop& Server::loop(std::size_t index) { return threads_[index]->loop(); }
MethodTable& Server::methods(std::size_t index) { return threads_[index]->methods(); }

void Server::start(const std::vector<int>& descriptors) {
  for (const int descriptor : descriptors) {
    listeners_.push_back(std::make_unique<Listener>(descriptor, threads_, limits_, counters_));
    listeners_.back()->listen();
  }
  for (std::size_t i = 0; i < threads_.size(); ++i) threads_[i]->start(i);
}

void Server::announce_end() {
  for (const auto& thread : threads_) thread->each(&Connection::announce_end);
}

void Server::stop(TimePoint until) {
  if (listeners_.empty()) return;
  std::binary_semaphore stopped(0);
  Once::post(threads_.front()->loop(), [&] {
    for (const auto& listener : listeners_) listener->stop();
    stopped.release();
  });
  stopped.acquire();
  for (const auto& thread : threads_) thread->each(&Connection::leave);
  const auto open = [&] {
    return std::any_of(threads_.begin(), threads_.end(),
                       [](const auto& thread) { return thread->connections() > 0; });
  };
  while (open() && std::chrono::steady_clock::now() < until) {
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

void Server::release() {
  for (const auto& thread : threads_) thread->end();
  listeners_.clear();
  threads_.clear();
}

}  // namespace tessera::http2
