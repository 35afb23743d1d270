// The HTTP/2 layer without a server above it: messages and statuses, limits, floods and timeouts.
#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include "common/text.h"
#include "http2/grpc_wire.h"
#include "http2_support.h"

namespace tessera::http2 {
namespace {

using namespace std::chrono_literals;
using test::begin_call;
using test::frame;
using test::Link;
using test::message;
using test::preface;
using test::status_of;
using test::whole_call;

TEST(GrpcWireTest, ReadsTimeoutsInEveryUnit) {
  const TimePoint now{1h};
  EXPECT_EQ(deadline_after(now, "2H"), now + 2h);
  EXPECT_EQ(deadline_after(now, "3M"), now + 3min);
  EXPECT_EQ(deadline_after(now, "0S"), now);
  EXPECT_EQ(deadline_after(now, "99999999m"), now + 99'999'999ms);
  EXPECT_EQ(deadline_after(now, "5u"), now + 5us);
  EXPECT_EQ(deadline_after(now, "7n"), now + 7ns);
  EXPECT_EQ(deadline_after(now, "99999999H"), kNever);
  for (const char* wrong : {"", "S", "5", "5s", "-5S", "+5S", "5 S", "100000000S", "5SS", "0x5S"}) {
    EXPECT_EQ(deadline_after(now, wrong), std::nullopt) << wrong;
  }
}

TEST(GrpcWireTest, EncodesWhatIsNotPrintable) {
  EXPECT_EQ(percent_encoded("a 100% \n\xc3\xa9~"), "a 100%25 %0A%C3%A9~");
  EXPECT_EQ(percent_encoded(std::string(2'000, 'x')).size(), 1'000u);
}

TEST(GrpcWireTest, KnowsItsContentTypes) {
  EXPECT_TRUE(is_grpc_content("application/grpc"));
  EXPECT_TRUE(is_grpc_content("application/grpc+proto"));
  EXPECT_TRUE(is_grpc_content("application/grpc;charset=x"));
  EXPECT_FALSE(is_grpc_content("application/grpc-web"));
  EXPECT_FALSE(is_grpc_content("application/json"));
}

// However the bytes are cut, the same ones are passed, but for the frames that are dropped.
TEST(FrameFilterTest, PassesTheSameBytesHoweverTheyAreCut) {
  const std::string kept = preface() + frame(NGHTTP2_PING, 0, 0, "12345678") + whole_call(1, "x");
  const std::string dropped = frame(NGHTTP2_RST_STREAM, 0, 9, "1234");
  const std::string sent = preface() + dropped + frame(NGHTTP2_PING, 0, 0, "12345678") + dropped +
                           dropped + whole_call(1, "x") + dropped;
  for (std::size_t piece = 1; piece <= sent.size(); ++piece) {
    FrameFilter filter;
    std::string passed;
    int frames = 0;
    for (std::size_t at = 0; at < sent.size(); at += piece) {
      const std::string part = sent.substr(at, piece);
      ASSERT_TRUE(filter.feed(
          std::as_bytes(std::span(part)),
          [&](const FrameHead& head) {
            ++frames;
            return head.stream == 9 ? FrameFilter::Verdict::kDrop : FrameFilter::Verdict::kPass;
          },
          [&](std::span<const std::byte> bytes) {
            passed.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
            return true;
          }));
    }
    EXPECT_EQ(passed, kept) << piece;
    EXPECT_EQ(frames, 8) << piece;
  }
}

TEST(ConnectionTest, AnswersACallHoweverItsBytesAreCut) {
  const std::string sent = preface() + whole_call(1, "hello");
  for (const std::size_t piece : {1u, 2u, 7u, 1'000u}) {
    Link link;
    for (std::size_t at = 0; at < sent.size(); at += piece) link.send(sent.substr(at, piece));
    EXPECT_EQ(link.data[1], message("hello")) << piece;
    EXPECT_EQ(status_of(link, 1), "0");
    EXPECT_EQ(link.headers[1][":status"], "200");
    EXPECT_EQ(link.headers[1]["content-type"], "application/grpc");
    EXPECT_EQ(link.counters.streams, 0);
    EXPECT_EQ(link.counters.held_bytes(), 0);
  }
}

TEST(ConnectionTest, PutsALargeMessageTogetherAndGivesItsBytesBack) {
  Link link;
  link.send(preface() + begin_call(1));
  const std::string content(300'000, 'y');
  const std::string whole = message(content);
  for (std::size_t at = 0; at < whole.size(); at += 16'000) {
    if (at > 16'000) {
      EXPECT_GT(link.counters.held_bytes(), 0);
    }
    link.send(frame(NGHTTP2_DATA, 0, 1, whole.substr(at, 16'000)));
  }
  EXPECT_EQ(link.counters.held_bytes(), 0);
  // Only as much is answered as the client's windows allow.
  EXPECT_EQ(link.data[1].size(), 65'535u);
  EXPECT_EQ(link.data[1], whole.substr(0, 65'535));
}

TEST(ConnectionTest, StreamsUntilTheClientHasNoMore) {
  Link link;
  link.send(preface() + begin_call(1, "/test/Stream"));
  link.send(frame(NGHTTP2_DATA, 0, 1, message("a") + message("b") + message("c").substr(0, 3)));
  EXPECT_EQ(link.data[1], message("a") + message("b"));
  link.send(frame(NGHTTP2_DATA, NGHTTP2_FLAG_END_STREAM, 1, message("c").substr(3)));
  EXPECT_EQ(link.data[1], message("a") + message("b") + message("c"));
  EXPECT_EQ(status_of(link, 1), "0");
}

TEST(ConnectionTest, SaysWhatIsWrongWithACall) {
  Limits limits;
  limits.max_message_bytes = 100;
  const std::string compressed = "\1" + message("x").substr(1);
  const std::string of_no_kind = "\2" + message("x").substr(1);
  const auto data = [](const std::string& body) {
    return frame(NGHTTP2_DATA, NGHTTP2_FLAG_END_STREAM, 1, body);
  };
  const struct {
    std::string sent;
    std::string status;
    std::string text;
  } table[] = {
      {begin_call(1, "/no/Such"), "12", "this server has no method '/no/Such'"},
      {begin_call(1, "/test/Echo", test::literal("grpc-encoding", "snappy")), "12",
       "grpc-encoding is 'snappy', expected one of identity,deflate,gzip"},
      {begin_call(1, "/test/Echo", test::literal("grpc-timeout", "1x")), "3",
       "grpc-timeout is '1x', expected up to eight digits and a unit of H, M, S, m, u, n"},
      {begin_call(1) + data(""), "12", "the call has no message, expected one"},
      {begin_call(1) + data(message("abc").substr(0, 6)), "3",
       "the message ended after 1 of 3 bytes"},
      {begin_call(1) + data(compressed), "3",
       "the message is compressed, but the header grpc-encoding does not say how"},
      {begin_call(1) + data(of_no_kind), "3",
       "the message's first byte says neither that it is compressed (1) nor that it is not (0)"},
      {begin_call(1) + data(message(std::string(101, 'x'))), "8",
       "the message has 101 bytes, the limit is 100"},
  };
  for (const auto& [sent, status, text] : table) {
    Link link(limits);
    link.send(preface() + sent);
    EXPECT_EQ(status_of(link, 1), status) << text;
    EXPECT_EQ(link.headers[1]["grpc-message"], text);
    EXPECT_EQ(link.headers[1]["grpc-accept-encoding"], "identity,deflate,gzip");
    EXPECT_EQ(link.counters.streams, 0);
    // The connection lives on.
    link.send(whole_call(3, "next"));
    EXPECT_EQ(link.data[3], message("next"));
  }
}

TEST(ConnectionTest, RefusesWhatIsNotGrpcByItsHttpStatus) {
  Link link;
  const std::string get = test::literal(":method", "GET") + test::literal(":scheme", "http") +
                          test::literal(":path", "/") + test::literal(":authority", "test");
  const std::string json = test::literal(":method", "POST") + test::literal(":scheme", "http") +
                           test::literal(":path", "/") + test::literal(":authority", "test") +
                           test::literal("content-type", "application/json");
  const int ends = NGHTTP2_FLAG_END_HEADERS | NGHTTP2_FLAG_END_STREAM;
  link.send(preface() + frame(NGHTTP2_HEADERS, ends, 1, get) +
            frame(NGHTTP2_HEADERS, ends, 3, json));
  EXPECT_EQ(link.headers[1][":status"], "405");
  EXPECT_EQ(link.headers[3][":status"], "415");
}

TEST(ConnectionTest, AResetOfAStreamThatWasNeverOpenedIsNotHeard) {
  Link link;
  link.send(preface() + frame(NGHTTP2_RST_STREAM, 0, 7, test::big_endian(8, 4)) +
            whole_call(9, "on"));
  EXPECT_EQ(link.data[9], message("on"));
}

TEST(ConnectionTest, ACallThatIsResetWhileItIsInOtherHandsEndsOnce) {
  Link link;
  link.send(preface() + whole_call(1, "wait") + whole_call(3, "wait"));
  ASSERT_EQ(link.waiting.size(), 2u);
  link.send(frame(NGHTTP2_RST_STREAM, 0, 1, test::big_endian(8, 4)));
  EXPECT_EQ(link.counters.streams, 1);
  for (test::EchoCall* call : std::exchange(link.waiting, {})) call->answer();
  link.turn();
  EXPECT_EQ(link.data[1], "");
  EXPECT_EQ(link.data[3], message("late"));
  EXPECT_EQ(link.counters.streams, 0);
}

TEST(ConnectionTest, LeavesWhenItsLastCallHasBeenAnswered) {
  Link link;
  link.send(preface() + whole_call(1, "wait"));
  link.connection().leave();
  link.turn();
  EXPECT_EQ(link.goaways, (std::vector<std::uint32_t>{NGHTTP2_NO_ERROR}));
  EXPECT_FALSE(link.closed);
  for (test::EchoCall* call : std::exchange(link.waiting, {})) call->answer();
  link.turn();
  EXPECT_EQ(link.data[1], message("late"));
  EXPECT_TRUE(link.closed);
  EXPECT_EQ(link.closed_for(CloseReason::kDrain), 1u);
}

// Sends `piece` again and again until the server has enough of it.
void expect_closed_for(CloseReason reason, const std::string& begin, const auto& piece,
                       Limits limits = {}) {
  limits.max_control_frames_per_s = 20;
  limits.max_pings_per_s = 20;
  limits.max_resets_per_s = 20;
  limits.max_connection_streams = 10;
  Link link(limits);
  link.send(preface() + begin);
  for (std::uint32_t i = 0; i < 3'000 && !link.closed; ++i) link.send(piece(2 * i + 101));
  EXPECT_TRUE(link.closed);
  EXPECT_EQ(link.closed_for(reason), 1u) << kCloseReasonNames[static_cast<std::size_t>(reason)];
  ASSERT_FALSE(link.goaways.empty());
  EXPECT_EQ(link.goaways.back(), NGHTTP2_ENHANCE_YOUR_CALM);
  EXPECT_EQ(link.counters.streams, 0);
}

TEST(FloodTest, FramesThatCarryNothing) {
  const CloseReason reason = CloseReason::kControlFrames;
  expect_closed_for(CloseReason::kPings, "",
                    [](auto) { return frame(NGHTTP2_PING, 0, 0, "12345678"); });
  expect_closed_for(reason, "", [](auto) { return frame(NGHTTP2_SETTINGS, 0, 0); });
  expect_closed_for(
      reason, "", [](auto) { return frame(NGHTTP2_WINDOW_UPDATE, 0, 0, test::big_endian(1, 4)); });
  expect_closed_for(reason, "", [](auto id) {
    return frame(NGHTTP2_PRIORITY, 0, id, std::string(4, '\0') + "\x10");
  });
  expect_closed_for(reason, "", [](auto) { return frame(0xbe, 0, 0, "unknown"); });
  expect_closed_for(reason, begin_call(1), [](auto) { return frame(NGHTTP2_DATA, 0, 1); });
}

TEST(FloodTest, CallsThatComeToNothing) {
  const CloseReason reason = CloseReason::kResets;
  expect_closed_for(reason, "", [](auto id) {
    return begin_call(id) + frame(NGHTTP2_RST_STREAM, 0, id, test::big_endian(8, 4));
  });
  expect_closed_for(reason, "", [](auto id) { return begin_call(id, "/no/Such"); });
  // More calls than it may have: each is refused, and the connection goes in the end.
  expect_closed_for(reason, "", [](auto id) { return begin_call(id); });
}

TEST(FloodTest, HeadersThatDoNotEnd) {
  const CloseReason reason = CloseReason::kHeaderBytes;
  expect_closed_for(
      reason, frame(NGHTTP2_HEADERS, 0, 1, test::call_headers("/test/Echo")), [](auto) {
        return frame(NGHTTP2_CONTINUATION, 0, 1, test::literal("a", std::string(100, 'b')));
      });
  // A thousand times an entry of the table, a byte each.
  Limits limits;
  limits.max_header_bytes = 4'096;
  expect_closed_for(
      reason, "",
      [](auto id) {
        return frame(NGHTTP2_HEADERS, NGHTTP2_FLAG_END_HEADERS, id,
                     test::call_headers("/test/Echo") + std::string(1'000, '\x90'));
      },
      limits);
}

TEST(TimeoutTest, WhoIsSlowIsEnded) {
  Limits limits;
  limits.handshake_timeout = limits.message_timeout = limits.write_timeout = 1ms;
  limits.idle_timeout = 1ms;
  const auto pause = [] { std::this_thread::sleep_for(3ms); };
  {
    Link link(limits);  // half a preface
    link.send("PRI * HTTP/2.0");
    pause();
    link.sweep();
    EXPECT_EQ(link.closed_for(CloseReason::kHandshake), 1u);
  }
  {
    Link link(limits);  // half a block of headers
    link.send(preface() + frame(NGHTTP2_HEADERS, 0, 1, test::call_headers("/test/Echo")));
    pause();
    link.sweep();
    EXPECT_EQ(link.closed_for(CloseReason::kHandshake), 1u);
  }
  {
    Link link(limits);  // nothing at all
    link.send(preface());
    pause();
    link.sweep();
    EXPECT_EQ(link.closed_for(CloseReason::kIdle), 1u);
    EXPECT_EQ(link.goaways, (std::vector<std::uint32_t>{NGHTTP2_NO_ERROR}));
  }
  {
    Link link(limits);  // half a message: that call goes, not the connection
    link.send(preface() + begin_call(1) + frame(NGHTTP2_DATA, 0, 1, message("abc").substr(0, 6)));
    pause();
    link.sweep();
    EXPECT_EQ(status_of(link, 1), "4");
    EXPECT_EQ(link.counters.held_bytes(), 0);
    link.send(whole_call(3, "next"));
    EXPECT_EQ(link.data[3], message("next"));
  }
  {
    Link link(limits);  // an answer that is not read
    const std::string no_window = frame(NGHTTP2_SETTINGS, 0, 0, std::string("\0\4\0\0\0\0", 6));
    link.send(preface() + no_window + whole_call(1, "x"));
    pause();
    link.sweep();
    EXPECT_EQ(link.closed_for(CloseReason::kSlowReader), 1u);
  }
}

TEST(TimeoutTest, AnOldConnectionIsLeftWithoutLosingACall) {
  Limits limits;
  limits.max_age = limits.age_notice = 1ms;
  const auto pause = [] { std::this_thread::sleep_for(3ms); };
  Link link(limits);
  link.send(preface() + whole_call(1, "wait"));
  pause();
  link.sweep();  // the notice: what begins now is heard
  EXPECT_EQ(link.goaways, (std::vector<std::uint32_t>{NGHTTP2_NO_ERROR}));
  link.send(whole_call(3, "heard"));
  EXPECT_EQ(link.data[3], message("heard"));
  pause();
  link.sweep();  // what begins now is not
  EXPECT_EQ(link.goaways.size(), 2u);
  link.send(whole_call(5, "late"));
  EXPECT_EQ(link.data.count(5), 0u);
  EXPECT_FALSE(link.closed);
  for (test::EchoCall* call : std::exchange(link.waiting, {})) call->answer();
  link.turn();
  EXPECT_EQ(link.data[1], message("late"));
  EXPECT_TRUE(link.closed);
  EXPECT_EQ(link.closed_for(CloseReason::kAge), 1u);
}

TEST(TimeoutTest, ACallThatNeverEndsDoesNotKeepAnOldConnection) {
  Limits limits;
  limits.max_age = limits.age_notice = limits.write_timeout = 1ms;
  Link link(limits);
  link.send(preface() + whole_call(1, "wait"));
  for (int i = 0; i < 4; ++i) {
    std::this_thread::sleep_for(3ms);
    link.sweep();
  }
  EXPECT_TRUE(link.closed);
  EXPECT_EQ(link.closed_for(CloseReason::kAge), 1u);
}

TEST(LimitTest, MessagesInPartHaveABound) {
  Limits limits;
  limits.max_buffered_bytes = 100'000;
  Link link(limits);
  link.send(preface());
  const std::string half = message(std::string(60'000, 'x')).substr(0, 16'000);
  for (std::uint32_t stream = 1; stream < 40; stream += 2) {
    link.send(begin_call(stream) + frame(NGHTTP2_DATA, 0, stream, half));
    EXPECT_LE(link.counters.held_bytes(), 100'000);
  }
  EXPECT_EQ(status_of(link, 39), "8");
  // A message that comes whole needs no such room.
  link.send(whole_call(41, "small"));
  EXPECT_EQ(link.data[41], message("small"));
}

TEST(LimitTest, EveryConnectionHasItsOwnCallsWhenTheServerIsFull) {
  Limits limits;
  limits.max_streams = 1;
  Link link(limits);
  link.send(preface());
  for (std::uint32_t i = 0; i < kOwnStreams + 1; ++i) link.send(whole_call(2 * i + 1, "wait"));
  EXPECT_EQ(link.waiting.size(), static_cast<std::size_t>(kOwnStreams));
  EXPECT_EQ(status_of(link, 2 * kOwnStreams + 1), "8");
}

TEST(LimitTest, ClientsThatReadNothingAreNotReadFrom) {
  Link link;
  link.send(preface());
  link.reads = false;
  const std::string pings = [] {
    std::string many;
    for (int i = 0; i < 5'000; ++i) many += frame(NGHTTP2_PING, 0, 0, "12345678");
    return many;
  }();
  link.send(pings);
  link.send(pings);
  EXPECT_EQ(link.closed_for(CloseReason::kProtocol), 0u);
}

}  // namespace
}  // namespace tessera::http2
