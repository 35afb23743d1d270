// nghttp2's objects as owned values, and the bytes between a session and its socket.
//
// Contract: one thread. A session is written through an Outgoing: fill takes all that the session
// has to say as far as `limit` allows, and flush gives it to the socket in one write where that
// takes it.
#pragma once

#include <nghttp2/nghttp2.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "http2/socket.h"

namespace tessera::http2 {

struct SessionEnd {
  void operator()(nghttp2_session* session) const { nghttp2_session_del(session); }
  void operator()(nghttp2_session_callbacks* callbacks) const {
    nghttp2_session_callbacks_del(callbacks);
  }
  void operator()(nghttp2_option* option) const { nghttp2_option_del(option); }
};

using SessionPointer = std::unique_ptr<nghttp2_session, SessionEnd>;
using CallbacksPointer = std::unique_ptr<nghttp2_session_callbacks, SessionEnd>;
using OptionPointer = std::unique_ptr<nghttp2_option, SessionEnd>;

// Throw std::bad_alloc where there is no memory for them.
CallbacksPointer make_callbacks();
OptionPointer make_option();

// A header of constant text; nghttp2 neither copies nor changes it.
inline nghttp2_nv header(std::string_view name, std::string_view value,
                         int flags = NGHTTP2_NV_FLAG_NO_COPY_NAME | NGHTTP2_NV_FLAG_NO_COPY_VALUE) {
  return {reinterpret_cast<std::uint8_t*>(const_cast<char*>(name.data())),
          reinterpret_cast<std::uint8_t*>(const_cast<char*>(value.data())), name.size(),
          value.size(), static_cast<std::uint8_t>(flags)};
}

// Appends frames of `session` to what waits in `to` until there are none or `limit` bytes wait.
// False: the session has failed.
template <typename Frames>
bool take_frames(nghttp2_session& session, Frames& to, std::size_t limit) {
  while (to.waiting() < limit) {
    const std::uint8_t* frames = nullptr;
    const ssize_t bytes = nghttp2_session_mem_send(&session, &frames);
    if (bytes < 0) return false;
    if (bytes == 0) return true;
    to.append(std::as_bytes(std::span(frames, static_cast<std::size_t>(bytes))));
  }
  return true;
}

class Outgoing {
 public:
  // Takes frames from `session` until it has none or `limit` bytes wait here. False: the session
  // has failed.
  bool fill(nghttp2_session& session, std::size_t limit) {
    return take_frames(session, *this, limit);
  }

  // A frame of one's own behind the session's.
  void append(std::span<const std::byte> frame) {
    bytes_.insert(bytes_.end(), frame.begin(), frame.end());
  }

  // Writes what waits. After it, what waits is what the socket would not take.
  Moved flush(Socket& socket);

  std::size_t waiting() const { return bytes_.size() - written_; }

 private:
  std::vector<std::byte> bytes_;
  std::size_t written_ = 0;
};

}  // namespace tessera::http2
