// libFuzzer target: the HTTP port. Bytes from a client, cut anywhere, into a connection, and what
// they bring to REST as bodies. Whatever they are, the connection ends or lives on, and gives back
// the room that bodies have taken; a body is refused, or becomes a message that is read as gRPC's
// are.
//
//   cpp_server/build.sh fuzz && build/cpp/fuzz/tests/fuzz_http -max_total_time=600
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "common/text.h"
#include "front/http_connection.h"
#include "front/rest_request.h"
#include "request/infer_wire.h"

namespace {

using namespace tessera;

constexpr std::size_t kMostBodyBytes = 200'000;

void require(bool holds) {
  if (!holds) std::abort();
}

std::optional<std::size_t> json_bytes_of(const std::string& said) {
  std::size_t bytes = 0;
  const char* const end = said.data() + said.size();
  const auto [stopped, error] = std::from_chars(said.data(), end, bytes);
  if (error != std::errc() || stopped != end) return std::nullopt;
  return bytes;
}

HttpAnswer answer_of(const HttpRequest& asked) {
  RestRequest request;
  const Status status = read_rest_request(asked.body, json_bytes_of(asked.head.json_bytes),
                                          {.name = "m", .version = "2", .verb = {}}, request);
  if (!status.ok()) return json_refusal(400, status.message);
  InferRequestView view;
  require(parse_infer(std::as_bytes(std::span(request.message)), view));
  require(view.model_name == "m" && view.model_version == "2");
  require(view.raw_contents == view.inputs);
  return {.body = request.message};
}

// Answers a path with itself, and POSTs once the turn is over.
class Answers final : public HttpAnswers {
 public:
  std::optional<HttpAnswer> refusal(const HttpHead& head) override {
    if (head.authorization != "no") return std::nullopt;
    return json_refusal(401, head.authorization);
  }
  HttpAnswer page(const std::string& path) override { return {.body = path}; }
  std::optional<std::size_t> most_body_bytes(const std::string& /*path*/) override {
    return kMostBodyBytes;
  }
  std::shared_ptr<HttpCall> post(std::uint64_t /*number*/, HttpRequest request) override {
    require(asked == nullptr && request.body.size() == request.head.body_bytes);
    asked = std::make_unique<HttpRequest>(std::move(request));
    return nullptr;
  }
  ByteBudget& bodies() override { return budget; }
  const HostRule& hosts() const override { return rule; }
  bool ending() const override { return false; }

  ByteBudget budget{kMostBodyBytes};
  const HostRule rule{{.listens_on = "127.0.0.1", .allowed = {"ranker.example.com"}}};
  std::unique_ptr<HttpRequest> asked;  // whose answer is awaited
};

// A connection and its client, both in one thread.
class Link {
 public:
  Link() {
    std::array<int, 2> made{};
    require(::socketpair(AF_UNIX, SOCK_STREAM, 0, made.data()) == 0);
    client_ = http2::Socket(made[0]);
    HttpAnswers& answers = answers_;
    connection_ = std::make_unique<HttpConnection>(1, loop_, http2::Socket(made[1]), answers,
                                                   times_, [this] { connection_.reset(); });
  }
  ~Link() {
    connection_.reset();
    answers_.asked.reset();
    require(answers_.budget.held() == 0);
  }

  void send(std::string_view bytes) {
    while (!bytes.empty() && connection_ != nullptr) {
      const http2::Moved moved = client_.write(std::as_bytes(std::span(bytes)));
      if (moved.ended) return;
      bytes.remove_prefix(moved.bytes);
      turn();
    }
  }

  void end() {
    client_.end_writing();
    turn();
  }

 private:
  void turn() {
    loop_.stop();
    loop_.run();
    if (const auto asked = std::exchange(answers_.asked, nullptr); asked != nullptr) {
      HttpAnswer answer = answer_of(*asked);
      if (connection_ != nullptr) connection_->give(std::move(answer));
    }
    std::array<std::byte, 65'536> bytes;
    for (http2::Moved moved; !moved.ended && !moved.blocked;) moved = client_.read(bytes);
  }

  http2::EventLoop loop_;
  const HttpTimes times_;
  Answers answers_;
  http2::Socket client_;
  std::unique_ptr<HttpConnection> connection_;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size < 3) return 0;
  // The first byte says whether the client's bytes are a body, the second how they are cut, the
  // third how many of them are JSON.
  const std::string bytes(reinterpret_cast<const char*>(data) + 3, size - 3);
  std::string sent;
  if ((data[0] & 1U) != 0) {
    sent = text("POST /v2/models/m/infer HTTP/1.1\r\nContent-Length: ", bytes.size(), "\r\n");
    if ((data[0] & 2U) != 0) sent += text("Inference-Header-Content-Length: ", +data[2], "\r\n");
    if ((data[0] & 4U) != 0) sent += "Expect: 100-continue\r\n";
    sent += "\r\n";
  }
  sent += bytes;
  // No more than 64 pieces: each is a turn of the loop.
  const std::size_t piece =
      data[1] == 0 ? sent.size() : std::max<std::size_t>(data[1], sent.size() / 64 + 1);
  Link link;
  for (std::size_t at = 0; at < sent.size(); at += piece) {
    link.send(std::string_view(sent).substr(at, piece));
  }
  link.end();
  return 0;
}
