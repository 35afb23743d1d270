// The HTTP/2 server's sockets: connections that come and go, and a system without descriptors.
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <optional>
#include <thread>

#include "http2/server.h"
#include "http2_support.h"

namespace tessera::http2 {
namespace {

using namespace std::chrono_literals;

class Listening {
 public:
  Listening() : descriptor_(::socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0)) {
    address_.sin_family = AF_INET;
    address_.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(address_);
    auto* const address = reinterpret_cast<sockaddr*>(&address_);
    EXPECT_EQ(::bind(descriptor_, address, size), 0);
    EXPECT_EQ(::listen(descriptor_, 1'024), 0);
    EXPECT_EQ(::getsockname(descriptor_, address, &size), 0);
    socket_ = Socket(descriptor_);
  }
  int descriptor() const { return descriptor_; }
  int port() const { return ntohs(address_.sin_port); }

 private:
  sockaddr_in address_{};
  const int descriptor_;
  Socket socket_;
};

struct Running {
  explicit Running(Limits limits = {}) : server(limits, counters, 2) {
    for (std::size_t i = 0; i < server.loops(); ++i) {
      server.methods(i).add("/test/Echo",
                            std::make_unique<test::EchoMethod>(Call::Kind::kUnary, waiting));
    }
    server.start({listening.descriptor()});
  }
  ~Running() {
    server.stop(std::chrono::steady_clock::now() + 5s);
    server.release();
  }

  // A client that is answered; nothing where it could not connect.
  std::optional<Socket> answered() {
    Socket client;
    if (!client.connect("127.0.0.1", listening.port()).empty()) return std::nullopt;
    const std::string sent = test::preface() + test::whole_call(1, "hello");
    client.write(std::as_bytes(std::span(sent)));
    std::string got;
    std::array<std::byte, 4'096> bytes;
    while (got.find("hello") == std::string::npos) {
      const Moved moved = client.read(bytes);
      if (moved.ended) return std::nullopt;
      got.append(reinterpret_cast<const char*>(bytes.data()), moved.bytes);
      if (moved.bytes == 0) std::this_thread::sleep_for(1ms);
    }
    return client;
  }

  void wait_for(std::int64_t connections) {
    while (counters.connections != connections) std::this_thread::sleep_for(1ms);
  }

  Listening listening;
  Counters counters;
  std::vector<test::EchoCall*> waiting;
  Server server;
};

TEST(ServerTest, AnswersManyConnectionsAndForgetsThem) {
  Running running;
  for (int round = 0; round < 3; ++round) {
    std::vector<Socket> clients;
    clients.reserve(50);
    for (int i = 0; i < 50; ++i) clients.push_back(std::move(running.answered().value()));
    running.wait_for(50);
    clients.clear();
    running.wait_for(0);
  }
  EXPECT_EQ(running.counters.closed[static_cast<std::size_t>(CloseReason::kClient)], 150u);
}

TEST(ServerTest, FurtherConnectionsWaitUntilThereIsRoom) {
  Limits limits;
  limits.max_connections = 2;
  Running running(limits);
  std::optional<Socket> first = running.answered();
  const std::optional<Socket> second = running.answered();
  std::optional<Socket> third;
  std::jthread waiting([&] { third = running.answered(); });
  first.reset();
  waiting.join();
  EXPECT_TRUE(third.has_value());
}

TEST(ServerTest, RecoversFromHavingNoDescriptors) {
  Running running;
  const Socket first = running.answered().value();
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  rlimit tight = before;
  tight.rlim_cur = static_cast<rlim_t>(first.descriptor()) + 10;
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &tight), 0);
  // Clients of this process take descriptors too: some connect, the server cannot accept them all.
  std::vector<Socket> clients;
  while (true) {
    Socket client;
    if (!client.connect("127.0.0.1", running.listening.port()).empty()) break;
    clients.push_back(std::move(client));
  }
  EXPECT_FALSE(clients.empty());
  clients.clear();
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_TRUE(running.answered().has_value());
}

TEST(ServerTest, AClientForWhomThereIsNoDescriptorIsClosedAtOnce) {
  Running running;
  const Socket first = running.answered().value();
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(static_cast<std::uint16_t>(running.listening.port()));
  const int client = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
  // Whatever is free below the limit is taken, so that the server has its spare descriptor alone.
  rlimit tight = before;
  tight.rlim_cur = static_cast<rlim_t>(client) + 1;
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &tight), 0);
  std::vector<int> taken;
  for (int one = ::dup(client); one >= 0; one = ::dup(client)) taken.push_back(one);
  ASSERT_EQ(::connect(client, reinterpret_cast<sockaddr*>(&address), sizeof(address)), 0);
  char byte = 0;
  EXPECT_LE(::recv(client, &byte, 1, 0), 0);  // the end, or a reset
  for (const int one : taken) ::close(one);
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
  ::close(client);
  EXPECT_EQ(running.counters.closed[static_cast<std::size_t>(CloseReason::kNoDescriptor)], 1u);
  EXPECT_TRUE(running.answered().has_value());
}

}  // namespace
}  // namespace tessera::http2
