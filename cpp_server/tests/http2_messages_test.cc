// The HTTP/2 layer's messages: compressed ones, and what one connection may hold of the room for
// all.
#include <gtest/gtest.h>
#include <zlib.h>

#include <string>

#include "http2_support.h"

namespace tessera::http2 {
namespace {

using test::frame;
using test::Link;
using test::message;
using test::preface;
using test::status_of;

std::string packed(const std::string& content, Encoding encoding) {
  z_stream stream{};
  const int format = encoding == Encoding::kGzip ? 16 : 0;
  EXPECT_EQ(::deflateInit2(&stream, 9, Z_DEFLATED, MAX_WBITS + format, 8, Z_DEFAULT_STRATEGY),
            Z_OK);
  std::string made(::deflateBound(&stream, content.size()), '\0');
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(content.data()));
  stream.avail_in = static_cast<uInt>(content.size());
  stream.next_out = reinterpret_cast<Bytef*>(made.data());
  stream.avail_out = static_cast<uInt>(made.size());
  EXPECT_EQ(::deflate(&stream, Z_FINISH), Z_STREAM_END);
  made.resize(made.size() - stream.avail_out);
  ::deflateEnd(&stream);
  return made;
}

// A call whose message says that it is compressed by `encoding` and is `bytes`.
std::string packed_call(std::uint32_t stream, Encoding encoding, const std::string& bytes,
                        std::string_view path = "/test/Echo") {
  const std::string_view name = kEncodingNames[static_cast<std::size_t>(encoding)];
  std::string sent = test::begin_call(stream, path, test::literal("grpc-encoding", name));
  const std::string body = "\1" + message(bytes).substr(1);
  constexpr std::size_t kFrame = 16'384;
  for (std::size_t at = 0; at < body.size(); at += kFrame) {
    const bool last = at + kFrame >= body.size();
    sent +=
        frame(NGHTTP2_DATA, last ? NGHTTP2_FLAG_END_STREAM : 0, stream, body.substr(at, kFrame));
  }
  return sent;
}

std::string of_letters(std::size_t count) {
  std::string made(count, '\0');
  unsigned state = 1;
  for (char& letter : made) {
    state = state * 1'664'525U + 1'013'904'223U;
    letter = static_cast<char>('a' + (state >> 24U) % 26U);
  }
  return made;
}

class PackedTest : public testing::TestWithParam<Encoding> {};

TEST_P(PackedTest, MessagesAreAnsweredAsTheOthersAre) {
  Link link;
  link.send(preface());
  std::uint32_t stream = 1;
  for (const std::size_t size : {0UL, 1UL, 100UL, 5'000UL, 60'000UL}) {
    const std::string content = of_letters(size);
    link.send(packed_call(stream, GetParam(), packed(content, GetParam())));
    EXPECT_EQ(status_of(link, stream), "0") << size;
    EXPECT_EQ(link.data[stream], message(content)) << size;
    EXPECT_EQ(link.headers[stream]["grpc-accept-encoding"], "identity,deflate,gzip");
    EXPECT_EQ(link.headers[stream].count("grpc-encoding"), 0u);
    stream += 2;
    // The window for answers.
    link.send(frame(NGHTTP2_WINDOW_UPDATE, 0, 0, test::big_endian(65'535, 4)));
  }
  // A call may compress some of its messages, and a stream has several.
  const std::string name(kEncodingNames[static_cast<std::size_t>(GetParam())]);
  link.send(test::begin_call(stream, "/test/Stream", test::literal("grpc-encoding", name)));
  const std::string two = "\1" + message(packed("two", GetParam())).substr(1);
  link.send(frame(NGHTTP2_DATA, NGHTTP2_FLAG_END_STREAM, stream, message("one") + two + two));
  EXPECT_EQ(link.data[stream], message("one") + message("two") + message("two"));
  EXPECT_EQ(status_of(link, stream), "0");
  EXPECT_EQ(link.counters.held_bytes(), 0);
}

TEST_P(PackedTest, UnpackingStopsAtTheLimit) {
  Limits limits;
  limits.max_message_bytes = 1'000'000;
  Link link(limits);
  link.send(preface());
  const std::string most = packed(std::string(1'000'000, 'x'), GetParam());
  const std::string more = packed(std::string(1'000'001, 'x'), GetParam());
  const std::string bomb = packed(std::string(50'000'000, 'x'), GetParam());
  link.send(packed_call(1, GetParam(), most) + packed_call(3, GetParam(), more) +
            packed_call(5, GetParam(), bomb) +
            packed_call(7, GetParam(), packed("on", GetParam())));
  for (int i = 0; i < 40 && status_of(link, 7).empty(); ++i) link.turn();
  EXPECT_EQ(link.data[1].size(), 65'535u);  // as much of it as the window allows
  for (const std::uint32_t stream : {3U, 5U}) {
    EXPECT_EQ(status_of(link, stream), "8");
    EXPECT_EQ(link.headers[stream]["grpc-message"],
              "the message unpacks to more than 1000000 bytes, which is the limit");
  }
  EXPECT_EQ(link.data[7], "");  // its answer waits for the window
  EXPECT_EQ(link.counters.held_bytes(), 0);
  // A message of a stream is a short one.
  link.send(
      packed_call(9, GetParam(), packed(std::string(65'537, 'x'), GetParam()), "/test/Stream"));
  EXPECT_EQ(link.headers[9]["grpc-message"],
            "the message unpacks to more than 65536 bytes, which is the limit");
}

TEST_P(PackedTest, DamageIsRefused) {
  const std::string good = packed(of_letters(3'000), GetParam());
  std::string changed = good;
  changed[good.size() / 2] = static_cast<char>(changed[good.size() / 2] ^ 0x55);
  const Encoding other = GetParam() == Encoding::kGzip ? Encoding::kDeflate : Encoding::kGzip;
  for (const std::string& bytes :
       {std::string(), std::string(100, 'x'), good.substr(0, 10), good.substr(0, good.size() - 1),
        good + "x", good + good, changed, packed("of another kind", other)}) {
    Link link;
    link.send(preface() + packed_call(1, GetParam(), bytes));
    EXPECT_EQ(status_of(link, 1), "3");
    const std::string name(kEncodingNames[static_cast<std::size_t>(GetParam())]);
    EXPECT_EQ(link.headers[1]["grpc-message"],
              "the message (" + std::to_string(bytes.size()) + " bytes) is not valid " + name);
    EXPECT_EQ(link.counters.held_bytes(), 0);
    link.send(packed_call(3, GetParam(), packed("next", GetParam())));
    EXPECT_EQ(link.data[3], message("next"));
  }
}

// The client goes away, or ends the call, while its message is being unpacked.
TEST_P(PackedTest, WhatIsBeingUnpackedMayEnd) {
  Limits limits;
  limits.max_message_bytes = 20'000'000;
  const std::string bomb = packed(std::string(20'000'000, 'x'), GetParam());
  const std::string sent =
      preface() + packed_call(1, GetParam(), bomb) + packed_call(3, GetParam(), bomb);
  {
    Link link(limits);
    link.client.write(std::as_bytes(std::span(sent)));
    link.turn();
    ASSERT_GT(link.counters.held_bytes(), 0);
    link.client = Socket();
    link.closed = true;
    link.turn();
    EXPECT_EQ(link.counters.held_bytes(), 0);
    EXPECT_EQ(link.counters.streams, 0);
  }
  Link link(limits);
  link.client.write(std::as_bytes(std::span(sent)));
  link.turn();
  ASSERT_GT(link.counters.held_bytes(), 0);
  for (const std::uint32_t stream : {1U, 3U}) {
    link.send(frame(NGHTTP2_RST_STREAM, 0, stream, test::big_endian(8, 4)));
  }
  EXPECT_EQ(link.counters.held_bytes(), 0);
  EXPECT_EQ(link.counters.streams, 0);
}

INSTANTIATE_TEST_SUITE_P(Encodings, PackedTest,
                         testing::Values(Encoding::kGzip, Encoding::kDeflate),
                         [](const auto& instance) {
                           return std::string(
                               kEncodingNames[static_cast<std::size_t>(instance.param)]);
                         });

TEST(ShareTest, AConnectionHoldsAtMostItsShareOfMessagesInPart) {
  Limits limits;
  limits.max_message_bytes = 60'000;
  limits.max_buffered_bytes = 200'000;
  Link link(limits);
  link.send(preface());
  const std::string half = message(std::string(60'000, 'x')).substr(0, 16'000);
  for (std::uint32_t stream = 1; stream < 40; stream += 2) {
    link.send(test::begin_call(stream) + frame(NGHTTP2_DATA, 0, stream, half));
    EXPECT_LE(link.counters.held_bytes(), 100'000);
  }
  EXPECT_EQ(status_of(link, 39), "8");
  EXPECT_EQ(link.headers[39]["grpc-message"].substr(0, 33), "the connection has its share: its");
  EXPECT_FALSE(link.counters.full_of_calls(std::chrono::steady_clock::now()));
}

TEST(ShareTest, OneLargestMessageAlwaysFits) {
  Limits limits;
  limits.max_message_bytes = 150'000;
  limits.max_buffered_bytes = 200'000;
  Link link(limits);
  link.send(preface());
  const std::string whole = message(std::string(150'000, 'x'));
  link.send(test::begin_call(1));
  for (std::size_t at = 0; at < whole.size(); at += 16'000) {
    link.send(frame(NGHTTP2_DATA, 0, 1, whole.substr(at, 16'000)));
  }
  EXPECT_EQ(link.data[1].size(), 65'535u);
}

TEST(ShareTest, ByteShareCountsWhatIsHeld) {
  ByteShare share(100);
  EXPECT_TRUE(share.take(60));
  EXPECT_FALSE(share.take(41));
  EXPECT_TRUE(share.take(40));
  share.give(100);
  EXPECT_TRUE(share.take(1'000));  // whoever holds nothing
  EXPECT_FALSE(share.take(1));
  EXPECT_EQ(share.held(), 1'000);
}

}  // namespace
}  // namespace tessera::http2
