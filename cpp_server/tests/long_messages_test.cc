// Long messages: a server reads them to where they stay, and tessera-load writes them from there.
#include <gtest/gtest.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <string>

#include "http2/message_reader.h"
#include "http2_support.h"
#include "load/gathered_frames.h"

namespace tessera::http2 {
namespace {

using test::frame;
using test::Link;
using test::message;
using test::status_of;

// A client that has heard how long frames may be, and takes answers of a megabyte.
void greet(Link& link) {
  const std::string windows =
      test::big_endian(NGHTTP2_SETTINGS_INITIAL_WINDOW_SIZE, 2) + test::big_endian(1U << 24U, 4);
  link.send("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(NGHTTP2_SETTINGS, 0, 0, windows) +
            frame(NGHTTP2_WINDOW_UPDATE, 0, 0, test::big_endian(1U << 24U, 4)));
  link.send(frame(NGHTTP2_SETTINGS, NGHTTP2_FLAG_ACK, 0));
}

std::string drawn(std::size_t bytes, std::minstd_rand& random) {
  std::string made(bytes, '\0');
  for (char& one : made) one = static_cast<char>(random());
  return made;
}

// What the server answered, once all of it has come.
std::string answer(Link& link, std::uint32_t stream) {
  for (int i = 0; i < 100 && status_of(link, stream).empty(); ++i) link.turn();
  return status_of(link, stream) == "0" ? link.data[stream] : "status " + status_of(link, stream);
}

// A call whose message is in frames of up to `longest` bytes.
std::string framed_call(std::uint32_t stream, const std::string& content, std::size_t longest) {
  std::string sent = test::begin_call(stream);
  const std::string body = message(content);
  for (std::size_t at = 0; at < body.size(); at += longest) {
    const bool last = at + longest >= body.size();
    sent +=
        frame(NGHTTP2_DATA, last ? NGHTTP2_FLAG_END_STREAM : 0, stream, body.substr(at, longest));
  }
  return sent;
}

class Sockets : public testing::TestWithParam<bool> {};

INSTANTIATE_TEST_SUITE_P(LongMessages, Sockets, testing::Bool(),
                         [](const auto& each) { return each.param ? "TCP" : "Unix"; });

TEST_P(Sockets, AreTheSameHoweverTheyCome) {
  std::minstd_rand random(7);
  Link link({}, GetParam());
  greet(link);
  std::uint32_t stream = 1;
  for (const std::size_t longest : {1'000UL, 16'384UL, 40'000UL, 1'048'576UL}) {
    for (const std::size_t piece : {7'001UL, 20'000UL, 65'536UL, 70'001UL, 2'000'000UL}) {
      const std::string content = drawn(200'000 + random() % 200'000, random);
      const std::string sent = framed_call(stream, content, longest);
      for (std::size_t at = 0; at < sent.size(); at += piece) link.send(sent.substr(at, piece));
      ASSERT_TRUE(answer(link, stream) == message(content)) << longest << " " << piece;
      stream += 2;
    }
  }
}

TEST_P(Sockets, OfSeveralCallsComeInTurn) {
  std::minstd_rand random(8);
  Link link({}, GetParam());
  greet(link);
  const std::string first = message(drawn(300'000, random));
  const std::string second = message(drawn(300'000, random));
  link.send(test::begin_call(1) + test::begin_call(3));
  constexpr std::size_t kFrame = 100'000;
  for (std::size_t at = 0; at < first.size(); at += kFrame) {
    const int flags = at + kFrame >= first.size() ? NGHTTP2_FLAG_END_STREAM : 0;
    link.send(frame(NGHTTP2_DATA, flags, 1, first.substr(at, kFrame)));
    link.send(frame(NGHTTP2_DATA, flags, 3, second.substr(at, kFrame)));
  }
  EXPECT_TRUE(answer(link, 1) == first);
  EXPECT_TRUE(answer(link, 3) == second);
}

TEST_P(Sockets, MayBePadded) {
  std::minstd_rand random(9);
  Link link({}, GetParam());
  greet(link);
  const std::string body = message(drawn(150'000, random));
  constexpr int kPadding = 200;
  const std::string padded = test::big_endian(kPadding, 1) + body + std::string(kPadding, '\0');
  link.send(test::begin_call(1));
  link.send(frame(NGHTTP2_DATA, NGHTTP2_FLAG_PADDED | NGHTTP2_FLAG_END_STREAM, 1, padded));
  EXPECT_TRUE(answer(link, 1) == body);
}

TEST(LongMessages, AreNotCopiedFromTheLoopsBuffer) {
  Link link({}, /*tcp=*/true);
  greet(link);
  std::fill(link.buffer().begin(), link.buffer().end(), std::byte{0});
  // The end may be copied.
  const std::string content =
      std::string(100'000, 'a') + std::string(400'000, 'z') + std::string(70'000, 'b');
  link.send(framed_call(1, content, 1'000'000));
  ASSERT_TRUE(answer(link, 1) == message(content));
  EXPECT_LE(std::count(link.buffer().begin(), link.buffer().end(), std::byte{'z'}), 16'384);
  // Behind it, another one is expected to be as long.
  std::fill(link.buffer().begin(), link.buffer().end(), std::byte{0});
  link.send(framed_call(3, content, 1'000'000));
  ASSERT_TRUE(answer(link, 3) == message(content));
  EXPECT_LE(std::count(link.buffer().begin(), link.buffer().end(), std::byte{'a'}), 16'384);
}

TEST_P(Sockets, OfCallsThatEndedAreForgotten) {
  std::minstd_rand random(10);
  Link link({}, GetParam());
  greet(link);
  const std::string call = framed_call(1, drawn(400'000, random), 1'000'000);
  link.send(call.substr(0, 200'000));
  link.send(call.substr(200'000) + frame(NGHTTP2_RST_STREAM, 0, 1, test::big_endian(8, 4)));
  const std::string other = framed_call(3, drawn(400'000, random), 1'000'000);
  link.send(other.substr(0, 300'000));
  link.connection().close(CloseReason::kDrain);
  link.send(other.substr(300'000));
  EXPECT_EQ(status_of(link, 3), "");
}

TEST(LongMessages, OnlyMessagesMayHaveLongFrames) {
  for (const int type : std::initializer_list<int>{NGHTTP2_SETTINGS, NGHTTP2_GOAWAY, 77}) {
    Link link;
    greet(link);
    link.send(frame(type, 0, 0, std::string(16'386, '\0')));
    EXPECT_EQ(link.closed_for(CloseReason::kControlFrames), 1u) << type;
  }
  Link link;
  greet(link);
  link.send(test::begin_call(1));
  link.send(frame(NGHTTP2_DATA, 0, 1, std::string(1'048'577, '\0')));
  EXPECT_TRUE(link.closed || !link.goaways.empty() || link.resets.contains(1));
  EXPECT_EQ(status_of(link, 1), "");
}

class ReaderTest : public testing::Test {
 protected:
  Limits limits_;
  Counters counters_;
};

TEST_F(ReaderTest, ReadsToItsRoom) {
  ConnectionBytes bytes(limits_, counters_);
  MessageReader reader;
  EXPECT_TRUE(reader.room(1'000, 1'000, bytes).empty());  // nothing is known of a message
  const std::string body = message(std::string(30'000, 'a') + std::string(70'000, 'b'));
  auto begin = std::as_bytes(std::span(body)).first(20'000);
  EXPECT_EQ(reader.feed(begin, bytes), MessageReader::State::kMore);
  EXPECT_TRUE(reader.room(0, 50'000, bytes).empty());
  const std::span<std::byte> room = reader.room(50'000, 50'000, bytes);
  ASSERT_EQ(room.size(), 50'000u);
  EXPECT_EQ(counters_.held_bytes(), 69'995);
  std::memcpy(room.data(), body.data() + 20'000, 40'000);
  std::span<const std::byte> came = room.first(40'000);  // less than there is room for
  EXPECT_EQ(reader.feed(came, bytes), MessageReader::State::kMore);
  EXPECT_EQ(reader.received(), 59'995u);
  // Twice what has come is taken, whatever else is said to be here.
  EXPECT_EQ(reader.room(20'000, 1'000'000, bytes).size(), 40'005u);
  EXPECT_EQ(counters_.held_bytes(), 100'000);
  const std::span<std::byte> rest = reader.room(50'000'000, 50'000'000, bytes);
  ASSERT_EQ(rest.size(), 40'005u);  // of the message, and nothing behind it
  std::memcpy(rest.data(), body.data() + 60'000, rest.size());
  came = rest;
  EXPECT_EQ(reader.feed(came, bytes), MessageReader::State::kWhole);
  EXPECT_EQ(std::memcmp(reader.message().data(), body.data() + 5, reader.message().size()), 0);
  EXPECT_TRUE(reader.room(1'000, 1'000, bytes).empty());
  EXPECT_EQ(counters_.held_bytes(), 0);
}

TEST_F(ReaderTest, HasNoRoomWhereTheServerIsFull) {
  limits_.max_buffered_bytes = 50'000;
  limits_.max_message_bytes = 200'000;
  ConnectionBytes bytes(limits_, counters_);
  MessageReader reader;
  const std::string body = message(std::string(150'000, 'a'));
  auto begin = std::as_bytes(std::span(body)).first(20'000);
  EXPECT_EQ(reader.feed(begin, bytes), MessageReader::State::kMore);
  EXPECT_TRUE(reader.room(100'000, 100'000, bytes).empty());
  auto more = std::as_bytes(std::span(body)).subspan(20'000, 100'000);
  EXPECT_EQ(reader.feed(more, bytes), MessageReader::State::kServerFull);
  reader.reset(0, bytes);
  EXPECT_EQ(counters_.held_bytes(), 0);
}

TEST_F(ReaderTest, GrowsOnceForWhatHasCome) {
  ConnectionBytes bytes(limits_, counters_);
  MessageReader reader;
  const std::string body = message(std::string(900'000, 'a'));
  auto data = std::as_bytes(std::span(body)).first(16'000);
  EXPECT_EQ(reader.feed(data, bytes, 200'000), MessageReader::State::kMore);
  const std::byte* const place = reader.message().data();
  for (std::size_t at = 16'000; at < 208'000; at += 16'000) {
    data = std::as_bytes(std::span(body)).subspan(at, 16'000);
    EXPECT_EQ(reader.feed(data, bytes, 208'000 - at), MessageReader::State::kMore);
    EXPECT_EQ(reader.message().data(), place) << at;
  }
  reader.reset(0, bytes);
}

TEST(GatheredFrames, WritesAllInOrderThroughASmallSocket) {
  std::minstd_rand random(11);
  std::array<int, 2> made{};
  ASSERT_EQ(::socketpair(AF_UNIX, SOCK_STREAM, 0, made.data()), 0);
  Socket from(made[0]);
  Socket to(made[1]);
  std::vector<std::string> messages;
  for (int i = 0; i < 200; ++i) {
    messages.push_back(drawn(i % 3 == 0 ? random() % 100 : random() % 60'000, random));
  }
  GatheredFrames frames;
  std::string expected;
  std::string got;
  std::size_t most = 0;
  std::array<std::byte, 10'000> bytes;
  const auto read = [&] {
    const Moved moved = to.read(bytes);
    got.append(reinterpret_cast<const char*>(bytes.data()), moved.bytes);
    return moved.bytes;
  };
  for (const std::string& one : messages) {
    const std::string head = "head of " + std::to_string(one.size());
    frames.append(std::as_bytes(std::span(head)));
    frames.refer(std::as_bytes(std::span(one)));
    expected += head + one;
    const Moved moved = frames.flush(from);
    ASSERT_FALSE(moved.ended);
    EXPECT_EQ(moved.blocked, frames.waiting() > 0);
    most = std::max(most, frames.waiting());
    read();
  }
  EXPECT_GT(most, 1'000'000u);  // the socket was full
  while (frames.waiting() > 0) {
    while (read() == bytes.size()) {
    }
    ASSERT_FALSE(frames.flush(from).ended);
  }
  while (read() > 0) {
  }
  EXPECT_TRUE(got == expected);
  const std::string last = "forgotten";
  frames.append(std::as_bytes(std::span(last)));
  frames.clear();
  EXPECT_EQ(frames.waiting(), 0u);
  EXPECT_EQ(frames.flush(from).bytes, 0u);
  to = Socket();
  frames.append(std::as_bytes(std::span(last)));
  EXPECT_TRUE(frames.flush(from).ended);
}

}  // namespace
}  // namespace tessera::http2
