// The part of a connection that knows messages: puts them together, unpacks them, and hands them to
// their calls.
#include <algorithm>
#include <string>
#include <utility>

#include "common/text.h"
#include "http2/connection.h"

namespace tessera::http2 {
namespace {

// A streaming call's message is unpacked at once, and so to no more than this: those that there are
// here (health watches, reflection) have short ones.
constexpr std::int64_t kStreamedBytes = 64 * 1024;

}  // namespace

int Connection::on_data(std::int32_t stream, std::span<const std::byte> data) {
  Call* const call = call_of(stream);
  if (call != nullptr) take_data(*call, data);
  return 0;
}

void Connection::take_data(Call& call, std::span<const std::byte> data) {
  using Message = MessageReader::State;
  while (!data.empty() && call.reading_) {
    const auto ahead = static_cast<std::size_t>(received_end_ - (data.data() + data.size()));
    switch (call.reader_.feed(data, *bytes_, ahead)) {
      case Message::kMore: return;
      case Message::kWhole: take_message(call); break;
      case Message::kWrongFlag:
        refuse(call, Status::invalid("the message's first byte says neither that it is compressed "
                                     "(1) nor that it is not (0)"));
        break;
      case Message::kTooLarge:
        refuse(call, {Code::kResourceExhausted,
                      text("the message has ", call.reader_.announced(), " bytes, the limit is ",
                           context_.limits.max_message_bytes)});
        break;
      case Message::kConnectionFull: refuse(call, full_status(/*of_server=*/false)); break;
      case Message::kServerFull: refuse(call, full_status(/*of_server=*/true)); break;
      case Message::kNoMemory:
        refuse(call, {Code::kResourceExhausted,
                      text("there is no memory for a message of ", call.reader_.announced(),
                           " bytes; try again later")});
        break;
    }
  }
}

Status Connection::full_status(bool of_server) {
  if (of_server) bytes_->note_full(context_.loop.now());
  const std::int64_t held = of_server ? context_.counters.held_bytes() : bytes_->held();
  const std::int64_t most = of_server ? context_.limits.max_buffered_bytes : bytes_->most();
  return {Code::kResourceExhausted,
          text(of_server ? "the server is full: messages that are coming in take "
                         : "the connection has its share: its messages that are coming in take ",
               held, " bytes (limit ", most, "); try again later")};
}

// A message has come, whole.
void Connection::take_message(Call& call) {
  if (!call.reader_.compressed()) {
    deliver(call);
  } else if (call.encoding_ == Encoding::kIdentity) {
    refuse(call, Status::invalid("the message is compressed, but the header grpc-encoding does not "
                                 "say how"));
  } else if (call.kind_ == Call::Kind::kStreaming) {
    unpack_now(call);
  } else {
    call.reading_ = false;
    packed_.push_back(&call);
    unpack();
  }
}

void Connection::deliver(Call& call) {
  if (call.kind_ == Call::Kind::kUnary) {
    call.reading_ = false;
    call.in_other_hands_ = true;
    call.on_message(call.reader_.message());  // the call may be gone after this
    return;
  }
  call.on_message(call.reader_.message());
  call.reader_.next();
}

// Unpacks what waits for it, as far as this turn may; the rest follows in the next.
void Connection::unpack() {
  const std::int64_t most = context_.limits.max_message_bytes;
  while (!packed_.empty()) {
    if (unpacking_steps_ == 0) {
      context_.loop.defer(*this);
      return;
    }
    --unpacking_steps_;
    Call& call = *packed_.front();
    if (!unpacker_.has_value()) {
      unpacker_.emplace(call.encoding_, call.reader_.message(), static_cast<std::size_t>(most),
                        *bytes_);
    }
    const Unpacker::State state = unpacker_->step();
    if (state == Unpacker::State::kMore) continue;
    Buffer made = unpacker_->take();
    unpacker_.reset();
    packed_.erase(packed_.begin());
    finish_unpacking(call, state, std::move(made), most);
  }
}

void Connection::unpack_now(Call& call) {
  const std::int64_t most = std::min(kStreamedBytes, context_.limits.max_message_bytes);
  auto state = Unpacker::State::kMore;
  Buffer made;
  {
    Unpacker unpacker(call.encoding_, call.reader_.message(), static_cast<std::size_t>(most),
                      *bytes_);
    while (state == Unpacker::State::kMore) state = unpacker.step();
    made = unpacker.take();
  }
  finish_unpacking(call, state, std::move(made), most);
}

void Connection::finish_unpacking(Call& call, Unpacker::State state, Buffer made,
                                  std::int64_t most) {
  using Outcome = Unpacker::State;
  switch (state) {
    case Outcome::kMore: break;
    case Outcome::kWhole:
      call.reader_.replace(std::move(made), *bytes_);
      deliver(call);
      break;
    case Outcome::kDamaged:
      refuse(call,
             Status::invalid(text("the message (", call.reader_.received(), " bytes) is not valid ",
                                  kEncodingNames[static_cast<std::size_t>(call.encoding_)])));
      break;
    case Outcome::kTooLarge:
      refuse(call, {Code::kResourceExhausted,
                    text("the message unpacks to more than ", most, " bytes, which is the limit")});
      break;
    case Outcome::kConnectionFull: refuse(call, full_status(/*of_server=*/false)); break;
    case Outcome::kServerFull: refuse(call, full_status(/*of_server=*/true)); break;
    case Outcome::kNoMemory:
      refuse(call, {Code::kResourceExhausted,
                    "there is no memory to unpack the message; try again later"});
      break;
  }
}

int Connection::messages_ended(std::int32_t stream) {
  Call* const call = call_of(stream);
  if (call == nullptr || !call->reading_) return 0;
  if (!call->reader_.empty()) {
    refuse(*call, Status::invalid(text("the message ended after ", call->reader_.received(), " of ",
                                       call->reader_.announced(), " bytes")));
  } else if (call->kind_ == Call::Kind::kUnary) {
    refuse(*call, {Code::kUnimplemented, "the call has no message, expected one"});
  } else {
    call->reading_ = false;
    call->on_last_message();
  }
  return 0;
}

// Ends a call whose message will not be heard.
void Connection::refuse(Call& call, const Status& status) {
  call.reading_ = false;
  call.reader_.reset(0, *bytes_);
  call.on_refused(status);
  if (call.kind_ == Call::Kind::kUnary) call.in_other_hands_ = true;  // ours
  call.finish(status);
}

}  // namespace tessera::http2
