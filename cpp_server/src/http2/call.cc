#include "http2/call.h"

#include <new>

#include "common/text.h"
#include "http2/connection.h"
#include "http2/grpc_wire.h"

namespace tessera::http2 {

std::string_view Call::peer() const {
  return connection_ == nullptr ? std::string_view() : connection_->peer();
}
namespace {

// A call keeps buffers up to this size for its next use.
constexpr std::size_t kKeptBytes = 32 * 1024;

}  // namespace

std::byte* Call::begin_message(std::size_t bytes) {
  if (sent_ == answer_.size()) {  // whatever was written has been taken
    answer_.clear();
    sent_ = 0;
  }
  if (!answer_.reserve(answer_.size() + kPrefixBytes + bytes)) throw std::bad_alloc();
  write_prefix(bytes, answer_.extend(kPrefixBytes));
  return answer_.extend(bytes);
}

void Call::flush() {
  if (connection_ != nullptr) connection_->answer(*this);
}

void Call::finish(const Status& status) {
  if (kind_ == Kind::kStreaming) {
    if (in_other_hands_ || finished_) return;
    in_other_hands_ = true;  // until it runs, as a unary call is
  }
  status_ = status;
  loop_.post(*this);
}

void Call::run() {
  in_other_hands_ = false;
  finished_ = true;
  if (!status_.ok() && !submitted_) answer_.clear();
  if (connection_ != nullptr) {
    connection_->answer(*this);
  } else {
    end();
  }
}

void Call::release_message() { reader_.reset(kKeptBytes, *bytes_); }

Status Call::take_room(std::size_t bytes) {
  const auto wanted = static_cast<std::int64_t>(bytes);
  using Room = ConnectionBytes::Room;
  switch (bytes_->take(wanted)) {
    case Room::kTaken: room_bytes_ += wanted; return {};
    case Room::kConnectionFull:
      return {Code::kResourceExhausted, text("the connection has its share: what it holds takes ",
                                             bytes_->held(), " bytes (limit ", bytes_->most(),
                                             "), this answer brings ", bytes, "; try again later")};
    case Room::kServerFull: break;
  }
  bytes_->note_full(loop_.now());
  return {Code::kResourceExhausted, text("the server is full: there is no room for an answer of ",
                                         bytes, " bytes; try again later")};
}

void Call::closed() {
  connection_ = nullptr;
  if (!done_) on_cancelled();
  if (!in_other_hands_) end();
}

void Call::end() {
  reader_.reset(kKeptBytes, *bytes_);
  if (room_bytes_ > 0) bytes_->give(room_bytes_);
  room_bytes_ = 0;
  answer_.clear();
  if (answer_.capacity() > kKeptBytes) answer_.free();
  sent_ = 0;
  reading_ = submitted_ = finished_ = done_ = false;
  status_ = {};
  deadline_ = kNever;
  told_id_ = {};
  on_end();
}

}  // namespace tessera::http2
