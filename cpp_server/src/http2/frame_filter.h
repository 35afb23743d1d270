// Looks at the head of every frame that a client sends before the session does.
//
// It is where frames are counted, and where one kind is taken out that nghttp2 ends a connection
// for: RST_STREAM of a stream that was never opened, which gRPC's C library (1.51 at least) sends
// for a call that is cancelled before its headers have been written.
//
// Contract: plain state of one thread. feed is given all that a connection sends, in pieces as they
// come.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <span>

namespace tessera::http2 {

// RFC 9113, section 4.1.
struct FrameHead {
  static constexpr std::size_t kBytes = 9;

  explicit FrameHead(std::span<const std::byte, kBytes> bytes)
      : length(number(bytes.subspan<0, 3>())),
        type(static_cast<std::uint8_t>(bytes[3])),
        flags(static_cast<std::uint8_t>(bytes[4])),
        stream(number(bytes.subspan<5, 4>()) & 0x7fffffffU) {}

  std::uint32_t length;
  std::uint8_t type;
  std::uint8_t flags;
  std::uint32_t stream;

 private:
  static std::uint32_t number(std::span<const std::byte> bytes) {
    std::uint32_t value = 0;
    for (const std::byte byte : bytes) value = value << 8U | static_cast<std::uint32_t>(byte);
    return value;
  }
};

class FrameFilter {
 public:
  enum class Verdict { kPass, kDrop, kStop };

  // Calls `judge(head)` for each frame's head, and `pass(bytes)` with what is not dropped, in
  // order. False: one of them said stop (kStop; false).
  template <typename Judge, typename Pass>
  bool feed(std::span<const std::byte> bytes, const Judge& judge, const Pass& pass) {
    std::size_t from = 0;  // what has not been passed begins here
    for (std::size_t at = 0; at < bytes.size();) {
      if (body_left_ > 0) {
        const std::size_t now = std::min(body_left_, bytes.size() - at);
        at += now;
        body_left_ -= now;
        if (dropping_) from = at;
        continue;
      }
      const std::size_t begin = at - std::min(at, head_bytes_);
      while (head_bytes_ < FrameHead::kBytes && at < bytes.size())
        head_[head_bytes_++] = bytes[at++];
      const std::size_t here = std::min(head_bytes_, at - begin);  // of the head, in these bytes
      if (head_bytes_ < FrameHead::kBytes) {
        return pass_between(bytes, from, at - here, pass);  // the rest of the head is yet to come
      }
      const FrameHead head{std::span<const std::byte, FrameHead::kBytes>(head_)};
      const Verdict verdict = judge(head);
      if (verdict == Verdict::kStop) return false;
      dropping_ = verdict == Verdict::kDrop;
      body_left_ = head.length;
      const bool held_back = here < FrameHead::kBytes;  // its beginning was in earlier bytes
      if (dropping_ || held_back) {
        if (!pass_between(bytes, from, at - here, pass)) return false;
        if (!dropping_ && !pass(std::span<const std::byte>(head_))) return false;
        from = at;
      }
      head_bytes_ = 0;
    }
    return pass_between(bytes, from, bytes.size(), pass);
  }

  // How much of the last frame's body is yet to be passed, and the frame. Before the first one: the
  // client's preface, as if it were of stream 0.
  std::size_t body_left() const { return dropping_ ? 0 : body_left_; }
  FrameHead head() const { return FrameHead{std::span<const std::byte, FrameHead::kBytes>(head_)}; }

 private:
  template <typename Pass>
  static bool pass_between(std::span<const std::byte> bytes, std::size_t from, std::size_t to,
                           const Pass& pass) {
    return from >= to || pass(bytes.subspan(from, to - from));
  }

  static constexpr std::size_t kPrefaceBytes = 24;  // RFC 9113, section 3.4

  std::array<std::byte, FrameHead::kBytes> head_{};
  std::size_t head_bytes_ = 0;
  std::size_t body_left_ = kPrefaceBytes;
  bool dropping_ = false;
};

}  // namespace tessera::http2
