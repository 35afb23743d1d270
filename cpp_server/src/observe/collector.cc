#include "observe/collector.h"

#include <netdb.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <memory>
#include <optional>

#include "common/flags.h"
#include "common/text.h"

namespace tessera {
namespace {

constexpr std::string_view kScheme = "http://";
constexpr std::string_view kDefaultPort = "4318";
constexpr std::string_view kTracesPath = "/v1/traces";
constexpr int kMostPort = 65'535;
constexpr std::size_t kMostReceived = 64 * 1024;
constexpr std::string_view kHeadEnd = "\r\n\r\n";

std::optional<long> number_of(std::string_view digits) {
  long number = 0;
  const char* const end = digits.data() + digits.size();
  const auto parsed = std::from_chars(digits.data(), end, number);
  if (parsed.ec != std::errc() || parsed.ptr != end || number < 0) return std::nullopt;
  return number;
}

class Connection {
 public:
  Connection(const Collector& collector, TimePoint until) : until_(until) {
    addrinfo hints{};
    hints.ai_socktype = SOCK_STREAM;
    addrinfo* found = nullptr;
    const int failed =
        ::getaddrinfo(collector.host.c_str(), collector.port.c_str(), &hints, &found);
    if (failed != 0) throw NoAnswer(::gai_strerror(failed));
    const std::unique_ptr<addrinfo, void (*)(addrinfo*)> owner(found, ::freeaddrinfo);
    int error = 0;
    for (const addrinfo* one = found; one != nullptr; one = one->ai_next) {
      close();
      descriptor_ = ::socket(one->ai_family, one->ai_socktype | SOCK_CLOEXEC, one->ai_protocol);
      if (descriptor_ >= 0) {
        limit(SO_SNDTIMEO);
        if (::connect(descriptor_, one->ai_addr, one->ai_addrlen) == 0) return;
      }
      error = errno;
    }
    close();
    throw NoAnswer(error == EINPROGRESS ? "it did not answer in time" : std::strerror(error));
  }
  ~Connection() { close(); }
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  void send(std::string_view bytes) {
    while (!bytes.empty()) {
      limit(SO_SNDTIMEO);
      const ssize_t sent = ::send(descriptor_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (sent < 0 && errno != EINTR) fail();
      if (sent > 0) bytes.remove_prefix(static_cast<std::size_t>(sent));
    }
  }

  // Appends what has come; false: the other side has ended.
  bool receive(std::string& into) {
    constexpr std::size_t kStep = 4 * 1024;
    limit(SO_RCVTIMEO);
    const std::size_t before = into.size();
    into.resize(before + kStep);
    const ssize_t received = ::recv(descriptor_, into.data() + before, kStep, 0);
    into.resize(before + static_cast<std::size_t>(std::max<ssize_t>(received, 0)));
    if (received < 0 && errno != EINTR) fail();
    return received != 0;
  }

 private:
  // What is left of the time, for the next call of the system.
  void limit(int option) const {
    const Duration left = until_ - std::chrono::steady_clock::now();
    const auto micros = std::chrono::duration_cast<std::chrono::microseconds>(left).count();
    if (micros <= 0) throw NoAnswer("it did not answer in time");
    constexpr long kMicros = 1'000'000;
    const timeval time{.tv_sec = micros / kMicros, .tv_usec = micros % kMicros};
    ::setsockopt(descriptor_, SOL_SOCKET, option, &time, sizeof(time));
  }

  [[noreturn]] static void fail() {
    if (errno == EAGAIN || errno == EWOULDBLOCK) throw NoAnswer("it did not answer in time");
    throw NoAnswer(std::strerror(errno));
  }

  void close() {
    if (descriptor_ >= 0) ::close(descriptor_);
    descriptor_ = -1;
  }

  const TimePoint until_;
  int descriptor_ = -1;
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
  const auto length = given.has_value() ? number_of(*given) : std::nullopt;
  return length.has_value() &&
         received.size() - end - kHeadEnd.size() >= static_cast<std::size_t>(*length);
}

}  // namespace

Collector read_collector(const std::string& url) {
  const auto refuse = [&] {
    refuse_flag("otlp-endpoint", "'" + url + "'",
                "give http://HOST:PORT of a collector that takes OTLP over HTTP, such as "
                "http://127.0.0.1:4318");
  };
  const bool plain =
      std::all_of(url.begin(), url.end(), [](char c) { return c > ' ' && c <= '~'; });
  if (!url.starts_with(kScheme) || !plain || url.find_first_of("@?#\\") != std::string::npos) {
    refuse();
  }
  Collector collector{.url = url};
  const std::string rest = url.substr(kScheme.size());
  const std::size_t slash = std::min(rest.find('/'), rest.size());
  collector.authority = rest.substr(0, slash);
  collector.path = rest.substr(slash);
  while (collector.path.ends_with('/')) collector.path.pop_back();
  collector.path += kTracesPath;
  std::string host = collector.authority;
  const std::size_t bracket = host.rfind(']');
  const std::size_t colon = host.rfind(':');
  collector.port = kDefaultPort;
  if (colon != std::string::npos && (bracket == std::string::npos || colon > bracket)) {
    collector.port = host.substr(colon + 1);
    host.resize(colon);
  }
  if (host.starts_with('[') && host.ends_with(']')) host = host.substr(1, host.size() - 2);
  const auto port = number_of(collector.port);
  if (host.empty() || host.find_first_of("[]") != std::string::npos ||
      (host.find(':') != std::string::npos && bracket == std::string::npos) || !port.has_value() ||
      *port < 1 || *port > kMostPort) {
    refuse();
  }
  collector.host = host;
  return collector;
}

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
    status = number_of(head.substr(kStatusAt, kStatusDigits));
  }
  if (!status.has_value() || *status < kLeastStatus) {
    throw NoAnswer("what it answered is not HTTP");
  }
  CollectorAnswer answer{.status = static_cast<int>(*status)};
  const auto wait = number_of(header(head, "retry-after").value_or(""));
  if (wait.has_value()) answer.retry_after = std::chrono::seconds(*wait);
  answer.body = received.substr(end + kHeadEnd.size());
  return answer;
}

CollectorAnswer post_json(const Collector& collector, std::string_view before,
                          std::string_view body, std::string_view after, TimePoint until) {
  Connection connection(collector, until);
  connection.send(text("POST ", collector.path, " HTTP/1.1\r\nHost: ", collector.authority,
                       "\r\nUser-Agent: tessera-server\r\nContent-Type: application/json"
                       "\r\nContent-Length: ",
                       before.size() + body.size() + after.size(),
                       "\r\nConnection: close\r\n\r\n"));
  connection.send(before);
  connection.send(body);
  connection.send(after);
  std::string received;
  while (!is_whole(received) && received.size() < kMostReceived) {
    if (!connection.receive(received)) break;
  }
  return read_answer(received);
}

}  // namespace tessera
