// libFuzzer target: frames and headers from a client, cut anywhere, into a connection. Whatever
// they are, the connection ends or lives on, and gives back what it has taken.
//
//   cpp_server/build.sh fuzz && build/cpp/fuzz/tests/fuzz_http2 -max_total_time=600
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <string>

#include "http2_support.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace tessera::http2;
  if (size < 2) return 0;
  Limits limits;
  limits.max_message_bytes = 100'000;
  limits.max_buffered_bytes = 200'000;
  limits.max_connection_streams = 20;
  limits.max_control_frames_per_s = 50;
  limits.max_pings_per_s = 50;
  test::Link link(limits);
  // The first byte says whether the client begins as it should, the second how its bytes are cut.
  std::string sent = (data[0] & 1U) != 0 ? test::preface() : "";
  if ((data[0] & 2U) != 0) sent += test::begin_call(1);
  if ((data[0] & 4U) != 0) sent += test::begin_call(3, "/test/Stream");
  const std::string gzip = test::literal("grpc-encoding", "gzip");
  const std::string deflate = test::literal("grpc-encoding", "deflate");
  if ((data[0] & 8U) != 0) sent += test::begin_call(5, "/test/Echo", gzip);
  if ((data[0] & 16U) != 0) sent += test::begin_call(7, "/test/Echo", deflate);
  if ((data[0] & 32U) != 0) sent += test::begin_call(9, "/test/Stream", deflate);
  sent.append(reinterpret_cast<const char*>(data) + 2, size - 2);
  // No more than 64 pieces: each is a turn of the loop.
  const std::size_t piece =
      data[1] == 0 ? sent.size() : std::max<std::size_t>(data[1], sent.size() / 64 + 1);
  for (std::size_t at = 0; at < sent.size() && !link.closed; at += piece) {
    link.send(sent.substr(at, piece));
  }
  link.sweep();
  if (link.counters.held_bytes() > limits.max_buffered_bytes) std::abort();
  link.client = Socket();
  link.closed = true;
  for (test::EchoCall* call : std::exchange(link.waiting, {})) call->answer();
  link.turn();
  if (link.counters.held_bytes() != 0 || link.counters.streams != 0) std::abort();
  return 0;
}
