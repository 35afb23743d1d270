#include "front/http_front.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <sstream>
#include <system_error>
#include <utility>
#include <vector>

#include "common/clock.h"
#include "common/text.h"

namespace tessera {
namespace {

constexpr std::size_t kMaxConnections = 64;
constexpr std::size_t kMaxHeadBytes = 16 * 1024;
constexpr Duration kTimeLimit = std::chrono::seconds(10);
constexpr Duration kTick = std::chrono::seconds(1);

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

struct Connection {
  int descriptor = -1;
  TimePoint until{};
  std::string in;
  std::string out;       // what is still to be sent
  bool closing = false;  // nothing more to do: close it
};

// Whether accept4 failed for a reason that lasts: its client stays in the kernel's queue, and poll
// would name it again at once.
bool no_room(int error) {
  return error == EMFILE || error == ENFILE || error == ENOBUFS || error == ENOMEM;
}

void send_some(Connection& connection) {
  while (!connection.out.empty()) {
    const ssize_t sent =
        ::send(connection.descriptor, connection.out.data(), connection.out.size(), MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0) {
      connection.closing = errno != EAGAIN && errno != EWOULDBLOCK;
      return;
    }
    connection.out.erase(0, static_cast<std::size_t>(sent));
  }
  connection.closing = true;
}

void receive_some(Connection& connection,
                  const std::function<HttpAnswer(const std::string&)>& answer) {
  char bytes[4096];
  const ssize_t got = ::recv(connection.descriptor, bytes, sizeof(bytes), 0);
  if (got < 0) {
    connection.closing = errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR;
    return;
  }
  if (got == 0) {
    connection.closing = true;
    return;
  }
  connection.in.append(bytes, static_cast<std::size_t>(got));
  const auto end = connection.in.find("\r\n\r\n");
  if (end != std::string::npos) {
    connection.out = http_response(connection.in.substr(0, end), answer);
    send_some(connection);
  } else if (connection.in.size() > kMaxHeadBytes) {
    connection.out = rendered({.status = 400, .body = "the request is too large\n"}, true);
    send_some(connection);
  }
}

}  // namespace

std::string http_response(const std::string& head,
                          const std::function<HttpAnswer(const std::string&)>& answer) {
  std::istringstream words(head.substr(0, head.find("\r\n")));
  std::string method;
  std::string target;
  std::string protocol;
  words >> method >> target >> protocol;
  if (!protocol.starts_with("HTTP/1.") || !target.starts_with('/')) {
    return rendered({.status = 400, .body = "this is not an HTTP/1.1 request\n"}, true);
  }
  if (method != "GET" && method != "HEAD") {
    return rendered({.status = 405, .body = "only GET and HEAD\n"}, true);
  }
  return rendered(answer(target.substr(0, target.find('?'))), method == "GET");
}

HttpFront::HttpFront(const std::string& host, int port,
                     std::function<HttpAnswer(const std::string&)> answer,
                     std::function<void()> tick)
    : socket_(host, port, "HTTP", "--http-port"),
      answer_(std::move(answer)),
      tick_(std::move(tick)),
      wake_(::eventfd(0, EFD_CLOEXEC)) {
  if (wake_ < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
  thread_ = std::thread([this] { run(); });
}

HttpFront::~HttpFront() {
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(wake_, &one, sizeof(one));
  thread_.join();
  ::close(wake_);
}

void HttpFront::run() {
  std::vector<Connection> connections;
  TimePoint next_tick = std::chrono::steady_clock::now() + kTick;
  bool refused = false;  // the system has no room for a client; asked again after a tick
  while (true) {
    std::vector<pollfd> polled = {{wake_, POLLIN, 0}};
    // A full house leaves further clients in the kernel's queue.
    const bool accepting = !refused && connections.size() < kMaxConnections;
    polled.push_back({accepting ? socket_.descriptor() : -1, POLLIN, 0});
    for (const Connection& connection : connections) {
      const short events = connection.out.empty() ? POLLIN : POLLOUT;
      polled.push_back({connection.descriptor, events, 0});
    }
    const TimePoint now = std::chrono::steady_clock::now();
    const auto wait = std::chrono::ceil<std::chrono::milliseconds>(next_tick - now).count();
    ::poll(polled.data(), polled.size(), static_cast<int>(std::max<std::int64_t>(wait, 0)));
    if (polled[0].revents != 0) break;
    const TimePoint then = std::chrono::steady_clock::now();
    if (then >= next_tick) {
      tick_();
      next_tick = then + kTick;
      refused = false;
    }
    for (std::size_t i = 0; i < connections.size(); ++i) {
      Connection& connection = connections[i];
      if (polled[i + 2].revents == 0) {
        connection.closing = then >= connection.until;
      } else if (connection.out.empty()) {
        receive_some(connection, answer_);
      } else {
        send_some(connection);
      }
      if (connection.closing) ::close(connection.descriptor);
    }
    std::erase_if(connections, [](const Connection& one) { return one.closing; });
    if ((polled[1].revents & POLLIN) != 0) {
      const int accepted =
          ::accept4(socket_.descriptor(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC);
      if (accepted >= 0) {
        connections.push_back({accepted, then + kTimeLimit, "", "", false});
      } else {
        refused = no_room(errno);
      }
    }
  }
  for (const Connection& connection : connections) ::close(connection.descriptor);
}

}  // namespace tessera
