#include "observe/collector_client.h"

#include <netdb.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <span>
#include <utility>

#include "common/flags.h"
#include "common/text.h"
#include "common/whole_number.h"
#include "http2/socket.h"
#include "security/certificates.h"

namespace tessera {
namespace {

constexpr std::size_t kMostReceived = 64 * 1024;
constexpr std::string_view kHeadEnd = "\r\n\r\n";
constexpr const char* kLate = "it did not answer in time";

// One connection to a collector; every wait ends at `until`.
class Connection {
 public:
  Connection(const Collector& collector, const http2::TlsContext& tls, TimePoint until)
      : until_(until) {
    connect(collector);
    if (tls == nullptr) return;
    socket_.start_tls(tls, http2::TlsSession::Role::kClient, collector.host);
    while (socket_.shaking_hands() && receive()) {
    }
    if (!socket_.shaking_hands()) return;
    const std::string refusal = socket_.refused_certificate();
    throw NoAnswer(refusal.empty() ? "TLS could not be agreed upon"
                                   : "its certificate is not accepted: " + refusal);
  }

  void send(std::string_view bytes) {
    while (!bytes.empty()) {
      const http2::Moved moved = socket_.write(std::as_bytes(std::span(bytes)));
      bytes.remove_prefix(moved.bytes);
      if (moved.ended) throw NoAnswer("it closed the connection");
      if (moved.blocked) wait(socket_.events(/*reads=*/false, /*writes=*/true));
    }
  }

  // Appends what has come to `received`, or waits for it; false: there will be no more.
  bool receive() {
    constexpr std::size_t kStep = 4 * 1024;
    const std::size_t before = received_.size();
    received_.resize(before + kStep);
    const http2::Moved moved =
        socket_.read(std::as_writable_bytes(std::span(received_)).subspan(before));
    received_.resize(before + moved.bytes);
    if (moved.ended) return moved.bytes > 0;
    if (moved.bytes == 0 && moved.blocked) wait(socket_.events(/*reads=*/true, /*writes=*/false));
    return true;
  }

  const std::string& received() const { return received_; }

 private:
  void connect(const Collector& collector) {
    addrinfo hints{};
    hints.ai_socktype = SOCK_STREAM;
    addrinfo* found = nullptr;
    const int failed =
        ::getaddrinfo(collector.host.c_str(), collector.port.c_str(), &hints, &found);
    if (failed != 0) throw NoAnswer(::gai_strerror(failed));
    const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(found, ::freeaddrinfo);
    int error = 0;
    for (const addrinfo* one = found; one != nullptr; one = one->ai_next) {
      const int made = ::socket(one->ai_family, one->ai_socktype | SOCK_CLOEXEC, one->ai_protocol);
      if (made < 0) {
        error = errno;
        continue;
      }
      socket_ = http2::Socket(made);
      error = ::connect(made, one->ai_addr, one->ai_addrlen) == 0 ? 0 : errno;
      if (error == EINPROGRESS) {
        wait(EPOLLOUT);
        socklen_t size = sizeof(error);
        ::getsockopt(made, SOL_SOCKET, SO_ERROR, &error, &size);
      }
      if (error == 0) return;
    }
    throw NoAnswer(std::strerror(error));
  }

  // Until the socket is ready for one of `events`, which are epoll's.
  void wait(std::uint32_t events) const {
    const short reads = (events & EPOLLIN) != 0 ? POLLIN : 0;
    const short writes = (events & EPOLLOUT) != 0 ? POLLOUT : 0;
    pollfd asked{socket_.descriptor(), static_cast<short>(reads | writes), 0};
    while (true) {
      const Duration left = until_ - std::chrono::steady_clock::now();
      const std::int64_t millis = std::chrono::ceil<std::chrono::milliseconds>(left).count();
      if (millis <= 0) throw NoAnswer(kLate);
      constexpr std::int64_t kMost = std::numeric_limits<int>::max();
      const int ready = ::poll(&asked, 1, static_cast<int>(std::min(millis, kMost)));
      if (ready > 0) return;
      if (ready < 0 && errno != EINTR) throw NoAnswer(std::strerror(errno));
    }
  }

  const TimePoint until_;
  http2::Socket socket_;
  std::string received_;
};

// The value of the header `name` (in lower case) in `head`, or nothing.
std::optional<std::string> header(std::string_view head, std::string_view name) {
  for (std::size_t at = head.find("\r\n"); at < head.size(); at = head.find("\r\n", at)) {
    at += 2;
    const std::string_view line = head.substr(at, head.find("\r\n", at) - at);
    const std::size_t colon = line.find(':');
    if (colon != name.size()) continue;
    const auto lower = [](char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c + 32) : c; };
    if (!std::equal(name.begin(), name.end(), line.begin(),
                    [&](char a, char b) { return a == lower(b); })) {
      continue;
    }
    const std::size_t begin = line.find_first_not_of(" \t", colon + 1);
    if (begin == std::string_view::npos) return "";
    return std::string(line.substr(begin, line.find_last_not_of(" \t") + 1 - begin));
  }
  return std::nullopt;
}

// Whether an answer that says how long it is has come as a whole.
bool is_whole(std::string_view received) {
  const std::size_t end = received.find(kHeadEnd);
  if (end == std::string_view::npos) return false;
  const auto given = header(received.substr(0, end), "content-length");
  const auto length = given.has_value() ? whole_number(*given) : std::nullopt;
  return length.has_value() &&
         received.size() - end - kHeadEnd.size() >= static_cast<std::size_t>(*length);
}

// A file that has to be changed does not end a server that is running.
std::string headers_now(const std::string& path) {
  if (path.empty()) return "";
  try {
    return read_collector_headers(path);
  } catch (const UsageError& error) {
    throw NoAnswer(error.what());
  }
}

}  // namespace

CollectorAnswer read_answer(std::string_view received) {
  constexpr std::string_view kStart = "HTTP/1.";
  constexpr std::size_t kStatusAt = 9;
  constexpr std::size_t kStatusDigits = 3;
  constexpr long kLeastStatus = 200;
  const std::size_t end = received.find(kHeadEnd);
  const std::string_view head = received.substr(0, std::min(end, received.size()));
  std::optional<long> status;
  if (end != std::string_view::npos && head.starts_with(kStart) &&
      head.size() >= kStatusAt + kStatusDigits && head[kStatusAt - 1] == ' ') {
    status = whole_number(head.substr(kStatusAt, kStatusDigits));
  }
  if (!status.has_value() || *status < kLeastStatus) {
    throw NoAnswer("what it answered is not HTTP");
  }
  CollectorAnswer answer{.status = static_cast<int>(*status)};
  const auto wait = whole_number(header(head, "retry-after").value_or(""));
  if (wait.has_value()) answer.retry_after = std::chrono::seconds(*wait);
  answer.body = received.substr(end + kHeadEnd.size());
  return answer;
}

CollectorClient::CollectorClient(Collector collector, const std::string& ca,
                                 std::string headers_file)
    : collector_(std::move(collector)), headers_file_(std::move(headers_file)) {
  if (collector_.encrypted) tls_ = make_client_tls({.cert = "", .key = "", .ca = ca}, "http/1.1");
  if (!headers_file_.empty()) static_cast<void>(read_collector_headers(headers_file_));
}

CollectorAnswer CollectorClient::post(std::string_view before, std::string_view body,
                                      std::string_view after, TimePoint until) const {
  const std::string headers = headers_now(headers_file_);
  Connection connection(collector_, tls_, until);
  connection.send(text("POST ", collector_.path, " HTTP/1.1\r\nHost: ", collector_.authority,
                       "\r\nUser-Agent: tessera-server\r\nContent-Type: application/json"
                       "\r\nContent-Length: ",
                       before.size() + body.size() + after.size(), "\r\n", headers,
                       "Connection: close\r\n\r\n"));
  connection.send(before);
  connection.send(body);
  connection.send(after);
  while (!is_whole(connection.received()) && connection.received().size() < kMostReceived) {
    if (!connection.receive()) break;
  }
  if (connection.received().empty()) throw NoAnswer("it closed the connection");
  return read_answer(connection.received());
}

}  // namespace tessera
