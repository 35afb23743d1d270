#include "load/server_counters.h"

#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <map>

#include "common/text.h"

namespace tessera {
namespace {

constexpr time_t kPatienceSeconds = 10;
constexpr std::size_t kMostBytes = std::size_t{64} << 20;

class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  int get() const { return fd_; }

 private:
  int fd_;
};

// The value of `label` in a line of a metric, empty without it.
std::string label_of(std::string_view line, std::string_view label) {
  const std::string key = text(label, "=\"");
  const auto begin = line.find(key);
  if (begin == std::string_view::npos) return {};
  const auto value = line.substr(begin + key.size());
  return std::string(value.substr(0, value.find('"')));
}

[[noreturn]] void refuse(const Address& http, const std::string& why) {
  throw CountersError(text("--http-address is ", http.text, "; its /metrics ", why));
}

}  // namespace

ServerCounters parse_counters(std::string_view page) {
  ServerCounters counters;
  const std::map<std::string_view, double*> wanted = {
      {"process_cpu_seconds_total", &counters.cpu_seconds},
      {"tessera_batch_requests_count", &counters.batches},
      {"tessera_batch_requests_sum", &counters.batch_requests},
      {"tessera_batch_samples_sum", &counters.batch_samples}};
  std::map<std::string_view, int> seen;
  while (!page.empty()) {
    const std::string_view line = page.substr(0, page.find('\n'));
    page.remove_prefix(std::min(line.size() + 1, page.size()));
    const std::string_view name = line.substr(0, line.find_first_of("{ "));
    if (name == "tessera_build_info") {
      counters.server = label_of(line, "server");
      counters.version = label_of(line, "version");
    }
    const auto found = wanted.find(name);
    if (found == wanted.end()) continue;
    const std::string_view number = line.substr(line.rfind(' ') + 1);
    double value = 0;
    const auto parsed = std::from_chars(number.data(), number.data() + number.size(), value);
    if (parsed.ec != std::errc()) throw CountersError(text("have the line '", line, "'"));
    *found->second += value;  // over all models
    ++seen[found->first];
  }
  for (const auto& [name, target] : wanted) {
    if (seen[name] == 0) throw CountersError(text("have no ", name, ": is it a Tessera server?"));
  }
  if (counters.server != "cpp" && counters.server != "python") {
    throw CountersError("have no tessera_build_info of a server that is known");
  }
  return counters;
}

ServerCounters read_counters(const Address& http, const std::string& authorization) {
  const auto failed = [&](const char* what) {
    refuse(http, text(what, ": ", std::strerror(errno)));
  };
  const Descriptor socket(::socket(http.bytes.ss_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const timeval patience{.tv_sec = kPatienceSeconds, .tv_usec = 0};
  if (socket.get() < 0 ||
      ::setsockopt(socket.get(), SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience) != 0 ||
      ::connect(socket.get(), reinterpret_cast<const sockaddr*>(&http.bytes), http.length) != 0) {
    failed("cannot be asked for");
  }
  std::string request =
      text("GET /metrics HTTP/1.1\r\nHost: ", http.text, "\r\nConnection: close\r\n");
  if (!authorization.empty()) request += text("Authorization: ", authorization, "\r\n");
  request += "\r\n";
  if (::send(socket.get(), request.data(), request.size(), MSG_NOSIGNAL) !=
      static_cast<ssize_t>(request.size())) {
    failed("cannot be asked for");
  }
  std::string answer;
  std::array<char, 65'536> part{};
  while (true) {
    const ssize_t got = ::recv(socket.get(), part.data(), part.size(), 0);
    if (got < 0) failed("do not come");
    if (got == 0) break;
    answer.append(part.data(), static_cast<std::size_t>(got));
    if (answer.size() > kMostBytes) refuse(http, "do not end");
  }
  const auto body = answer.find("\r\n\r\n");
  const std::string_view status = std::string_view(answer).substr(0, answer.find('\r'));
  if (body == std::string::npos || status.find(" 200") == std::string_view::npos) {
    refuse(http, text("are answered with '", status.substr(0, 80), "'"));
  }
  try {
    return parse_counters(std::string_view(answer).substr(body + 4));
  } catch (const CountersError& error) {
    refuse(http, error.what());
  }
}

}  // namespace tessera
