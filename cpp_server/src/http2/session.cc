#include "http2/session.h"

#include <new>

namespace tessera::http2 {
namespace {

// A buffer that has grown beyond this is given back once it is empty.
constexpr std::size_t kKeptBytes = 256 * 1024;

}  // namespace

CallbacksPointer make_callbacks() {
  nghttp2_session_callbacks* made = nullptr;
  if (nghttp2_session_callbacks_new(&made) != 0) throw std::bad_alloc();
  return CallbacksPointer(made);
}

OptionPointer make_option() {
  nghttp2_option* made = nullptr;
  if (nghttp2_option_new(&made) != 0) throw std::bad_alloc();
  return OptionPointer(made);
}

Moved Outgoing::flush(Socket& socket) {
  if (waiting() == 0) return {};
  const Moved moved = socket.write(std::span(bytes_).subspan(written_));
  written_ += moved.bytes;
  if (written_ == bytes_.size()) {
    written_ = 0;
    bytes_.clear();
    if (bytes_.capacity() > kKeptBytes) bytes_ = {};
  } else if (written_ >= kKeptBytes) {
    bytes_.erase(bytes_.begin(), bytes_.begin() + static_cast<std::ptrdiff_t>(written_));
    written_ = 0;
  }
  return moved;
}

}  // namespace tessera::http2
