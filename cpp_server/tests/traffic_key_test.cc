// Where the key that decides between shares of the traffic comes from.
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <string>

#include "front/wire_protocol.h"
#include "http2/request_head.h"
#include "http2/socket.h"
#include "inference.pb.h"
#include "predictor.pb.h"
#include "support.h"

namespace tessera {
namespace {

struct Key {
  std::string key;
  std::string error;

  bool operator==(const Key&) const = default;
};

void PrintTo(const Key& key, std::ostream* out) { *out << key.key << " / " << key.error; }

template <typename Message>
Key key_of(WireProtocol& protocol, const Message& message) {
  const std::string bytes = message.SerializeAsString();
  EXPECT_TRUE(protocol.parse(test::as_bytes(bytes)));
  std::string_view key;
  const Status status = protocol.read_traffic_key(key);
  if (!status.ok()) {
    EXPECT_EQ(status.code, Code::kInvalidArgument);
    return {.key = "", .error = status.message};
  }
  return {.key = std::string(key), .error = ""};
}

TEST(TrafficKey, OfAPredictIsItsField) {
  const auto protocol = make_predict_protocol();
  predictor::PredictionRequest message;
  EXPECT_EQ(key_of(*protocol, message), (Key{}));
  message.set_traffic_key(std::string(1'024, 'k'));
  EXPECT_EQ(key_of(*protocol, message), (Key{message.traffic_key(), ""}));
  message.set_traffic_key(std::string(1'025, 'k'));
  EXPECT_EQ(key_of(*protocol, message), (Key{"", "traffic_key has 1025 bytes, the limit is 1024"}));
}

TEST(TrafficKey, OfAModelInferIsAParameterOrItsId) {
  const auto protocol = make_infer_protocol();
  inference::ModelInferRequest message;
  EXPECT_EQ(key_of(*protocol, message), (Key{}));
  message.set_id("the id");
  EXPECT_EQ(key_of(*protocol, message), (Key{"the id", ""}));
  auto& parameter = (*message.mutable_parameters())["traffic_key"];
  parameter.set_string_param("");
  EXPECT_EQ(key_of(*protocol, message), (Key{"the id", ""}));
  parameter.set_string_param("a user");
  EXPECT_EQ(key_of(*protocol, message), (Key{"a user", ""}));
  parameter.set_string_param(std::string(1'025, 'k'));
  EXPECT_EQ(key_of(*protocol, message),
            (Key{"", "parameter 'traffic_key' has 1025 bytes, the limit is 1024"}));
  parameter.set_int64_param(7);
  EXPECT_EQ(key_of(*protocol, message), (Key{"", "parameter 'traffic_key' is not a string"}));
}

TEST(TrafficKey, ARequestIdIsTheFirstOneAndHasABound) {
  const http2::MethodTable methods;
  http2::RequestHead head;
  EXPECT_EQ(head.request_id(), "");
  head.add("x-request-id", "first", methods);
  head.add("x-request-id", "second", methods);
  EXPECT_EQ(head.request_id(), "first");
  head.clear();
  EXPECT_EQ(head.request_id(), "");
  head.add("x-request-id", std::string(2'000, 'x'), methods);
  EXPECT_EQ(head.request_id(), std::string(http2::kMaxRequestIdBytes, 'x'));
}

// The address by which a server that listens on every IPv6 address knows a client that connects to
// it by `by`; empty where this machine has no such addresses.
std::string peer_of(const char* by) {
  const int listening = ::socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const int off = 0;
  ::setsockopt(listening, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof(off));
  sockaddr_in6 any{};
  any.sin6_family = AF_INET6;
  any.sin6_addr = in6addr_any;
  socklen_t length = sizeof(any);
  std::string peer;
  if (::bind(listening, reinterpret_cast<sockaddr*>(&any), length) == 0 &&
      ::listen(listening, 1) == 0 &&
      ::getsockname(listening, reinterpret_cast<sockaddr*>(&any), &length) == 0) {
    http2::Socket client;
    if (client.connect(by, ntohs(any.sin6_port)).empty()) {
      peer = http2::Socket(::accept4(listening, nullptr, nullptr, SOCK_CLOEXEC)).peer_address();
    }
  }
  ::close(listening);
  return peer;
}

TEST(TrafficKey, APeerIsItsIpAddress) {
  EXPECT_EQ(http2::Socket().peer_address(), "");
  const std::string six = peer_of("::1");
  if (six.empty()) GTEST_SKIP() << "this machine has no IPv6";
  EXPECT_EQ(six, "::1");
  EXPECT_EQ(peer_of("127.0.0.1"), "127.0.0.1");  // and not ::ffff:127.0.0.1
}

}  // namespace
}  // namespace tessera
