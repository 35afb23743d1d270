// The HTTP port's connections: who is answered, who makes room, and who has taken too long.
#include "front/http_front.h"

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <future>
#include <iterator>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/flags.h"
#include "common/text.h"

namespace tessera {
namespace {

constexpr std::size_t kBigBytes = 32 * 1024 * 1024;
constexpr const char* kPost =
    "POST /now HTTP/1.1\r\nConnection: close\r\nContent-Length: 9\r\n\r\nsome body";
constexpr const char* kGet = "GET /hello HTTP/1.1\r\nConnection: close\r\n\r\n";

class Client {
 public:
  Client() : descriptor_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {}
  ~Client() { ::close(descriptor_); }
  Client(Client&& other) noexcept : descriptor_(std::exchange(other.descriptor_, -1)) {}
  Client(const Client&) = delete;
  Client& operator=(const Client&) = delete;

  Client& connect(int port) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<std::uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(::connect(descriptor_, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
    return *this;
  }

  Client& say(const std::string& text) {
    EXPECT_EQ(::send(descriptor_, text.data(), text.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(text.size()));
    return *this;
  }

  // Everything up to the end of the connection, or so many bytes.
  std::string hear(std::size_t most = 2 * kBigBytes) {
    std::string all;
    std::array<char, 65'536> bytes{};
    while (all.size() < most) {
      const ssize_t got = ::recv(descriptor_, bytes.data(), std::min(bytes.size(), most), 0);
      if (got <= 0) break;
      all.append(bytes.data(), static_cast<std::size_t>(got));
    }
    return all;
  }

 private:
  int descriptor_;
};

std::ptrdiff_t descriptors() {
  return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {});
}

void wait_for_descriptors(std::ptrdiff_t count) {
  while (descriptors() != count) ::usleep(1'000);
}

HttpAnswer page(const std::string& path) {
  return {.body = path == "/big" ? std::string(kBigBytes, 'x') : "page of " + path};
}

// Answers /later from another thread, and all else at once.
std::shared_ptr<HttpCall> post_page(const HttpRequest& request, HttpDone done) {
  const std::string& path = request.head.path;
  const HttpAnswer answer{.body = path + " had '" + request.body + "'"};
  if (path == "/later") {
    std::thread([=, done = std::move(done)] { done(answer); }).detach();
  } else if (path != "/never") {
    done(answer);
  }
  return nullptr;
}

// A front on a free port, in which nobody has taken too long unless a test says so.
struct HttpFrontTest : testing::Test {
  static constexpr Duration kLong = std::chrono::hours(1);

  HttpFront& start(int max_connections,
                   HttpTimes times = {kLong, kLong, kLong, kLong, kLong, kLong}) {
    const HttpOptions options{.host = "127.0.0.1",
                              .port = 0,
                              .max_connections = max_connections,
                              .times = times,
                              .hosts = hosts};
    front = std::make_unique<HttpFront>(
        options, page, post, [] {}, log);
    return *front;
  }

  Client client() {
    Client made;
    made.connect(front->port());
    return made;
  }

  std::string ask() { return client().say(kGet).hear(); }

  PostFunction post = post_page;
  HostRule hosts;
  const Log log{LogLevel::kError, true, -1};
  std::unique_ptr<HttpFront> front;
};

TEST_F(HttpFrontTest, AnswersARequestInPiecesAndEndsTheConnection) {
  start(4);
  Client slow = client();
  slow.say("GET /hello HTTP").say("/1.1\r\nConnection: close\r\n").say("\r\n");
  const std::string answer = slow.hear();
  EXPECT_TRUE(answer.starts_with("HTTP/1.1 200 OK\r\n")) << answer;
  EXPECT_TRUE(answer.ends_with("page of /hello")) << answer;
}

TEST_F(HttpFrontTest, AnswersWhoIsTooLongAndWhoSendsABody) {
  start(4);
  EXPECT_TRUE(client().say(std::string(17'000, 'x')).hear().starts_with("HTTP/1.1 400 "));
  const std::string put = "PUT /hello HTTP/1.1\r\nContent-Length: 9\r\n\r\nsome body";
  EXPECT_TRUE(client().say(put).hear().starts_with("HTTP/1.1 405 "));
  post = nullptr;
  start(4);
  EXPECT_TRUE(client().say(kPost).hear().starts_with("HTTP/1.1 405 "));
}

TEST_F(HttpFrontTest, AnswersAPostWhenItsBodyHasCome) {
  start(4);
  for (const std::string path : {"/now", "/later"}) {
    Client slow = client();
    slow.say("POST " + path + " HTTP/1.0\r\ncontent-LENGTH:  9 \r\n\r\nso").say("me b").say("ody");
    const std::string answer = slow.hear();
    EXPECT_TRUE(answer.starts_with("HTTP/1.1 200 OK\r\n")) << answer;
    EXPECT_TRUE(answer.ends_with(path + " had 'some body'")) << answer;
  }
  const std::string empty = client().say("POST /now HTTP/1.0\r\n\r\n").hear();
  EXPECT_TRUE(empty.ends_with("/now had ''")) << empty;
}

TEST_F(HttpFrontTest, RefusesPostsThatItDoesNotHear) {
  start(4);
  const std::pair<const char*, const char*> cases[] = {
      {"Origin: http://evil.example", "403"},
      {"origin:null", "403"},
      {"Content-Length: 65537", "413"},
      {"Content-Length: 99999999999999999999999", "413"},
      {"Content-Length: -1", "400"},
      {"Content-Length: 1x", "400"},
      {"Content-Length:", "400"},
      {"Transfer-Encoding: chunked", "411"}};
  for (const auto& [line, status] : cases) {
    const std::string answer =
        client().say(text("POST /now HTTP/1.1\r\n", line, "\r\n\r\n")).hear();
    EXPECT_TRUE(answer.starts_with(text("HTTP/1.1 ", status, " "))) << answer;
    EXPECT_NE(answer.find("{\"error\":\""), std::string::npos) << answer;
  }
}

TEST_F(HttpFrontTest, RefusesHeadsThatAProxyMightReadInAnotherWay) {
  start(4);
  const std::string_view lines[] = {"Content-Length : 9",
                                    " Content-Length: 9",
                                    "Content-Length: 9\r\nContent-Length: 0",
                                    "Content-Length: 0\r\nTransfer-Encoding: chunked",
                                    "X: 1\nContent-Length: 9",
                                    "X: 1\r Content-Length: 9",
                                    "X: 1\r\n folded",
                                    "no colon",
                                    ": no name",
                                    "two words: 1",
                                    std::string_view("X\0: 1", 5),
                                    std::string_view("X: \0", 4),
                                    "X: \x7F",
                                    "X\x80: 1"};
  for (const std::string_view line : lines) {
    for (const char* request : {"GET /hello HTTP/1.1", "POST /now HTTP/1.1"}) {
      const std::string answer = client().say(text(request, "\r\n", line, "\r\n\r\n")).hear();
      EXPECT_TRUE(answer.starts_with("HTTP/1.1 400 ")) << line << ": " << answer;
    }
  }
  EXPECT_TRUE(
      client().say("GET /hello HTTP/1.1\nX: 1\r\n\r\n").hear().starts_with("HTTP/1.1 400 "));
  const std::string all = "!#$%&'*+-.^_`|~09azAZ: \t\x80~\r\nX:\r\n\r\n";
  EXPECT_TRUE(client().say("GET /hello HTTP/1.0\r\n" + all).hear().starts_with("HTTP/1.1 200 "));
}

TEST_F(HttpFrontTest, TakesNoBodyForTheNextRequest) {
  start(4);
  const std::string inner = "GET /inner HTTP/1.1\r\n\r\n";
  for (const std::string& line :
       {text("Content-Length: ", inner.size()), std::string("Transfer-Encoding: chunked")}) {
    Client slow = client();
    slow.say("GET /hello HTTP/1.1\r\n" + line + "\r\n\r\n");
    const std::string head = slow.hear(1);  // the answer is on its way
    slow.say(inner);
    const std::string answer = head + slow.hear();
    EXPECT_TRUE(answer.ends_with("page of /hello")) << answer;
  }
  const std::string none = "GET /hello HTTP/1.1\r\nContent-Length: 0\r\n\r\n";
  Client kept = client();
  EXPECT_NE(kept.say(none).hear(1), "");
  EXPECT_TRUE(kept.say("GET /inner HTTP/1.0\r\n\r\n").hear().ends_with("page of /inner"));
}

TEST_F(HttpFrontTest, HoldsBrowsersToTheNamesOfTheServer) {
  const auto status = [&](const std::string& path, const std::string& lines) {
    const std::string answer =
        client()
            .say(text("GET ", path, " HTTP/1.1\r\nConnection: close\r\n", lines, "\r\n"))
            .hear();
    return answer.substr(9, 3);
  };
  const std::string browser = "Accept-Language: en\r\n";
  start(4);
  EXPECT_EQ(status("/hello", "Host: evil.example\r\n" + browser), "200");
  hosts = HostRule({.listens_on = "127.0.0.1", .allowed = {"ranker.example"}});
  start(4);
  EXPECT_EQ(status("/hello", "Host: evil.example:8002\r\n" + browser), "403");
  EXPECT_EQ(status("/hello", browser), "403");
  EXPECT_EQ(status("/hello", "Host: evil.example\r\n"), "200");
  EXPECT_EQ(status("/hello", "Host: RANKER.example.:8002\r\n" + browser), "200");
  EXPECT_EQ(status("/readyz", "Host: evil.example\r\n" + browser), "200");
}

TEST(HostRule, KnowsAddressesLocalhostAndWhatIsAllowed) {
  const HostRule rule({.listens_on = "127.0.0.1", .allowed = {"ranker.example"}});
  for (const char* host :
       {"127.0.0.1", "10.1.2.3:8002", "[::1]:8002", "[fe80::1]", "localhost", "LocalHost:8002",
        "a.localhost:1", "localhost.", "ranker.example", "Ranker.Example.:80"}) {
    EXPECT_TRUE(rule.knows(host)) << host;
  }
  for (const char* host :
       {"", ":8002", ".", "evil.example", "ranker.example.evil.example", "x.ranker.example",
        "127.0.0.1.example", "xlocalhost", "::1", "ranker"}) {
    EXPECT_FALSE(rule.knows(host)) << host;
  }
}

TEST(HostRule, CoversPagesOfThisMachineAloneAndOfNamedServers) {
  const auto covers = [](const char* host, std::vector<std::string> allowed, bool guarded = false) {
    return HostRule({.listens_on = host, .allowed = std::move(allowed), .guarded = guarded})
        .covers_pages();
  };
  for (const char* host : {"127.0.0.1", "127.1.2.3", "::1", "localhost"}) {
    EXPECT_TRUE(covers(host, {})) << host;
    EXPECT_FALSE(covers(host, {}, true)) << host;
    EXPECT_FALSE(covers(host, {"a.example", "*"})) << host;
  }
  for (const char* host : {"0.0.0.0", "::", "10.0.0.1", "ranker.example"}) {
    EXPECT_FALSE(covers(host, {})) << host;
    EXPECT_TRUE(covers(host, {"a.example"})) << host;
  }
  EXPECT_FALSE(HostRule().covers_pages());
}

TEST(HostRule, TakesNamesOfHostsAlone) {
  EXPECT_EQ(checked_host_name("Ranker.Example."), "ranker.example");
  EXPECT_EQ(checked_host_name("*"), "*");
  for (const std::string& name :
       {std::string(), std::string("."), std::string("http://a"), std::string("a:80"),
        std::string("*.a"), std::string("a b"), std::string(254, 'a')}) {
    EXPECT_THROW(checked_host_name(name), FlagError) << name;
  }
}

// So many bytes, or what came before the end.
std::string hear_all(Client& client, std::size_t bytes) {
  std::string all;
  while (all.size() < bytes) {
    const std::string more = client.hear(bytes - all.size());
    if (more.empty()) break;
    all += more;
  }
  return all;
}

TEST_F(HttpFrontTest, KeepsAConnectionForFurtherRequests) {
  start(4);
  Client kept = client();
  const std::string get = http_response({.body = "page of /hello"}, true, true);
  const std::string posted = http_response({.body = "/later had 'abc'"}, true, true);
  for (int i = 0; i < 3; ++i) {
    kept.say("GET /hello HTTP/1.1\r\nHost: x\r\n\r\n");
    EXPECT_EQ(hear_all(kept, get.size()), get);
    kept.say("POST /later HTTP/1.1\r\nContent-Length: 3\r\n\r\na").say("bc");
    EXPECT_EQ(hear_all(kept, posted.size()), posted);
  }
  kept.say(kGet);
  EXPECT_TRUE(kept.hear().ends_with("Connection: close\r\n\r\npage of /hello"));
}

TEST_F(HttpFrontTest, AnswersOneOfTwoRequestsThatComeTogether) {
  start(4);
  const std::string get = "GET /hello HTTP/1.1\r\nHost: x\r\n\r\n";
  const std::string answer = client().say(get + get).hear();
  EXPECT_EQ(answer, http_response({.body = "page of /hello"}));
}

TEST_F(HttpFrontTest, AsksForABodyThatIsAnnounced) {
  start(4);
  Client waits = client();
  waits.say("POST /now HTTP/1.0\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n");
  const std::string asked = "HTTP/1.1 100 Continue\r\n\r\n";
  EXPECT_EQ(hear_all(waits, asked.size()), asked);
  EXPECT_TRUE(waits.say("ab").hear().ends_with("/now had 'ab'"));
}

TEST_F(HttpFrontTest, EndsConnectionsWithTheirNextAnswer) {
  start(4).announce_end();
  EXPECT_EQ(client().say("GET /hello HTTP/1.1\r\nHost: x\r\n\r\n").hear(),
            http_response({.body = "page of /hello"}));
}

TEST_F(HttpFrontTest, BodiesThatComeHaveABound) {
  constexpr std::size_t kBody = 1'000'000;
  const HttpOptions options{.host = "127.0.0.1",
                            .port = 0,
                            .max_connections = 4,
                            .max_bodies_bytes = kBody / 2,
                            .most_body_bytes = [](const std::string&) { return kBody; },
                            .times = {kLong, kLong, kLong, kLong, kLong, kLong}};
  front = std::make_unique<HttpFront>(
      options, page, post, [] {}, log);
  const auto ask_with = [this](std::size_t bytes) {
    const std::string head = text("POST /now HTTP/1.0\r\nContent-Length: ", bytes, "\r\n\r\n");
    return client().say(head + std::string(bytes, 'x')).hear();
  };
  for (int i = 0; i < 3; ++i) {  // and what was taken is given back
    const std::string refused = ask_with(kBody);
    EXPECT_TRUE(refused.starts_with("HTTP/1.1 429 ")) << refused;
    EXPECT_NE(refused.find("the server is full: bodies of requests over HTTP take "), refused.npos);
    EXPECT_TRUE(ask_with(kBody / 2).starts_with("HTTP/1.1 200 "));
  }
}

// What a POST has begun, and whether it has been given up.
struct GivenUp : HttpCall {
  explicit GivenUp(std::promise<void>& when) : given_up(when) {}
  void cancel() override { given_up.set_value(); }
  std::promise<void>& given_up;
};

TEST_F(HttpFrontTest, WhoGoesGivesUpWhatItAskedFor) {
  std::promise<void> given_up;
  post = [&](const HttpRequest&, const HttpDone&) { return std::make_shared<GivenUp>(given_up); };
  start(4);
  { client().say(kPost); }
  given_up.get_future().wait();
}

TEST_F(HttpFrontTest, WhoWaitsForAnOutcomeHasItsLimitAndMayGo) {
  start(4, {kLong, kLong, kLong, kLong, std::chrono::milliseconds(20)});
  EXPECT_EQ(client().say("POST /never HTTP/1.1\r\n\r\n").hear(), "");
  start(4, {kLong, kLong, kLong, kLong, kLong});
  const std::ptrdiff_t before = descriptors();
  {
    Client gone = client();
    gone.say("POST /never HTTP/1.1\r\n\r\n");
    wait_for_descriptors(before + 2);
  }
  wait_for_descriptors(before);
}

TEST_F(HttpFrontTest, AnAnswerThatComesAfterTheEndIsDropped) {
  HttpDone late;
  std::promise<void> asked;
  post = [&](const HttpRequest&, HttpDone done) {
    late = std::move(done);
    asked.set_value();
    return std::shared_ptr<HttpCall>();
  };
  start(4);
  Client waiting = client();
  waiting.say(kPost);
  asked.get_future().wait();
  front.reset();
  late({.body = "too late"});
  EXPECT_EQ(waiting.hear(), "");
}

TEST_F(HttpFrontTest, TheOldestWithoutACompleteRequestMakesRoom) {
  start(3);
  Client silent = client();
  Client slow = client();
  slow.say("GET /he");
  Client busy = client();
  busy.say("GET /big HTTP/1.0\r\n\r\n");
  EXPECT_EQ(busy.hear(1).size(), 1u);  // its answer is on its way
  EXPECT_NE(ask(), "");
  EXPECT_EQ(silent.hear(), "");
  const Client another = client();
  EXPECT_NE(ask(), "");
  EXPECT_EQ(slow.hear(), "");
  EXPECT_GT(busy.hear().size(), kBigBytes);
}

TEST_F(HttpFrontTest, WhoDoesNotTakeTheAnswerGoesWhenNobodyElseCan) {
  start(2);
  std::vector<Client> stuck;
  for (int i = 0; i < 2; ++i) {
    stuck.push_back(client());
    stuck.back().say("GET /big HTTP/1.0\r\n\r\n").hear(1);
  }
  EXPECT_NE(ask(), "");
}

TEST_F(HttpFrontTest, EveryStepHasItsLimit) {
  const Duration brief = std::chrono::milliseconds(20);
  start(
      4,
      {.first_byte = brief, .request = kLong, .answer = kLong, .ending = kLong, .outcome = kLong});
  EXPECT_EQ(client().hear(), "");
  start(
      4,
      {.first_byte = kLong, .request = brief, .answer = kLong, .ending = kLong, .outcome = kLong});
  EXPECT_EQ(client().say("GET /").hear(), "");
  start(
      4,
      {.first_byte = kLong, .request = kLong, .answer = brief, .ending = kLong, .outcome = kLong});
  const std::ptrdiff_t before = descriptors();
  Client stuck = client();
  stuck.say("GET /big HTTP/1.0\r\n\r\n").hear(1);
  wait_for_descriptors(before + 1);  // the server's end is closed
  EXPECT_LT(stuck.hear().size(), kBigBytes);
}

TEST_F(HttpFrontTest, AnswersManyMoreClientsThanItMayHold) {
  start(8);
  std::vector<Client> idle;
  for (int i = 0; i < 400; ++i) {
    idle.push_back(client());
    if (i % 2 == 1) idle.back().say(std::string(kGet).substr(0, static_cast<std::size_t>(i) % 30));
    if (i % 50 == 0) {
      EXPECT_NE(ask(), "");
    }
  }
}

TEST_F(HttpFrontTest, WithoutDescriptorsTheOldestMakesRoom) {
  start(100);
  const std::ptrdiff_t before = descriptors();
  Client silent = client();
  wait_for_descriptors(before + 2);
  Client waiting;
  const int lowest_free = ::dup(0);
  ::close(lowest_free);
  rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  const rlimit full{static_cast<rlim_t>(lowest_free), limit.rlim_max};
  ::setrlimit(RLIMIT_NOFILE, &full);
  EXPECT_NE(waiting.connect(front->port()).say(kGet).hear(), "");
  ::setrlimit(RLIMIT_NOFILE, &limit);
  EXPECT_EQ(silent.hear(), "");
}

}  // namespace
}  // namespace tessera
