#include "http2/connection.h"

#include <sys/epoll.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <new>
#include <random>
#include <system_error>
#include <utility>

#include "http2/read_size.h"
#include "http2/session_callbacks.h"

namespace tessera::http2 {
namespace {

// What a client may send of a message, and of all messages, before it is told that it was taken.
// Everything is taken when it comes, so that these cost no memory.
constexpr std::uint32_t kStreamWindow = 1024 * 1024;
constexpr std::int32_t kConnectionWindow = 4 * 1024 * 1024;
// A message that a client sends in one frame can be read to where it stays. What is not of a call
// may be as long as HTTP/2 has it by default, as the session may keep it whole.
constexpr std::uint32_t kLongestDataFrame = kStreamWindow;
constexpr std::uint32_t kLongestFrame = 16 * 1024;
// Less than this is copied rather than read by a call of its own.
constexpr std::size_t kLeastInPlace = 16 * 1024;
// Frames that are made before the socket takes them, and how much of them one turn may write.
constexpr std::size_t kOutgoingBytes = 128 * 1024;
constexpr std::size_t kBytesPerTurn = 1024 * 1024;
// A client that leaves so many bytes unread is not read from.
constexpr std::size_t kUnreadBytes = 64 * 1024;
// How long, and for how many bytes, a connection that has been closed is still read.
constexpr Duration kLinger = std::chrono::seconds(1);
constexpr std::size_t kLingerBytes = 8 * 1024 * 1024;
// Steps of an Unpacker in a turn: compressed messages of one client do not hold up the others.
constexpr int kUnpackingSteps = 4;

SessionPointer make_session(const Limits& limits, void* user) {
  const OptionPointer option = make_option();
  nghttp2_option_set_no_closed_streams(option.get(), 1);
  // RateLimit counts resets.
  const auto resets = static_cast<std::uint64_t>(limits.max_resets_per_s) * kBurstSeconds * 2;
  nghttp2_option_set_stream_reset_rate_limit(option.get(), resets, resets);
  nghttp2_session* made = nullptr;
  if (nghttp2_session_server_new2(&made, &server_callbacks(), user, option.get()) != 0) {
    throw std::bad_alloc();
  }
  SessionPointer session(made);
  const std::array<nghttp2_settings_entry, 5> settings = {
      {{NGHTTP2_SETTINGS_MAX_CONCURRENT_STREAMS,
        static_cast<std::uint32_t>(limits.max_connection_streams)},
       {NGHTTP2_SETTINGS_MAX_HEADER_LIST_SIZE, static_cast<std::uint32_t>(limits.max_header_bytes)},
       {NGHTTP2_SETTINGS_INITIAL_WINDOW_SIZE, kStreamWindow},
       {NGHTTP2_SETTINGS_MAX_FRAME_SIZE, kLongestDataFrame},
       {NGHTTP2_SETTINGS_NO_RFC7540_PRIORITIES, 1}}};
  if (nghttp2_submit_settings(made, NGHTTP2_FLAG_NONE, settings.data(), settings.size()) != 0 ||
      nghttp2_session_set_local_window_size(made, NGHTTP2_FLAG_NONE, 0, kConnectionWindow) != 0) {
    throw std::bad_alloc();
  }
  return session;
}

// Between nine and eleven tenths of `age`.
Duration spread(Duration age) {
  constexpr int kSteps = 1'000;
  static thread_local std::minstd_rand random{std::random_device{}()};
  const auto step = static_cast<int>(random() % (2 * kSteps + 1)) - kSteps;
  return age + age * step / (10 * kSteps);
}

}  // namespace

Connection::Connection(const ConnectionContext& context, Socket socket)
    : context_(context),
      socket_(std::move(socket)),
      session_(make_session(context.limits, this)),
      read_bytes_(context.read_buffer.size()),
      bytes_(std::make_shared<ConnectionBytes>(context.limits, context.counters)),
      unpacking_steps_(kUnpackingSteps),
      control_frames_(context.limits.max_control_frames_per_s, context.loop.now()),
      pings_(context.limits.max_pings_per_s, context.loop.now()),
      resets_(context.limits.max_resets_per_s, context.loop.now()),
      begun_(context.loop.now()),
      idle_since_(begun_),
      progress_at_(begun_) {
  if (!context_.loop.add(socket_.descriptor(), EPOLLIN, *this)) {
    throw std::system_error(errno, std::generic_category(), "epoll_ctl");
  }
  watched_ = EPOLLIN;
  context_.counters.connections.fetch_add(1);
  context_.loop.defer(*this);  // our SETTINGS
  if (context.limits.max_age > Duration::zero()) old_at_ = begun_ + spread(context.limits.max_age);
}

Connection::~Connection() {
  close(CloseReason::kDrain);
  vanish();
  context_.loop.forget(*this);
}

const std::string& Connection::peer() {
  if (!peer_) peer_ = socket_.peer_address();
  return *peer_;
}

void Connection::on_ready(std::uint32_t events) {
  if (state_ == State::kGone) return;
  if ((events & (EPOLLIN | EPOLLHUP | EPOLLERR)) != 0) {
    // The more connections have sent something, the less of each is read in a turn.
    const std::size_t share = context_.read_buffer.size() / context_.loop.ready();
    if (!read_some(std::min(share, read_bytes_))) return;
  }
  if ((events & EPOLLOUT) != 0) socket_.push();
  context_.loop.defer(*this);
}

// Reads up to `share` bytes, and at least what must be read of a connection in a turn. False: it is
// not to be answered any more.
bool Connection::read_some(std::size_t share) {
  share = std::max(share, kLeastReadBytes);
  const TimePoint begin = std::chrono::steady_clock::now();
  std::size_t heard = 0;
  Moved moved;
  do {
    std::span<std::byte> into = rest_of_message(share - heard);
    const bool in_place = !into.empty();
    // Behind a message in a long frame there is likely to be another: of that little is read with
    // its head, which is copied, and the rest in place.
    if (!in_place) {
      into = context_.read_buffer.first(
          std::min(share - heard, long_frames_ ? kLeastReadBytes : share));
    }
    moved = socket_.read(into);
    if (moved.bytes > 0) long_frames_ = in_place;
    if (state_ == State::kLingering) {
      lingering_bytes_ += moved.bytes;
      if (moved.ended || lingering_bytes_ > kLingerBytes) vanish();
      return false;
    }
    if (moved.bytes > 0) receive(into.first(moved.bytes));
    heard += moved.bytes;
  } while (heard + kLeastReadBytes <= share && moved.bytes > 0 && !moved.blocked && !moved.ended &&
           !moved.kept && session_ != nullptr);
  if (heard > 0) {
    read_bytes_ = next_read_bytes(read_bytes_, heard, std::chrono::steady_clock::now() - begin,
                                  context_.read_buffer.size());
  }
  if (moved.ended) {
    close(socket_.shaking_hands() ? CloseReason::kTls : CloseReason::kClient);
    vanish();
    return false;
  }
  reads_on_ = moved.kept;
  return true;
}

// Where up to `most` bytes of the message whose frame is coming are to be read to, of those that
// the system has; empty: they are to be read to the loop's buffer.
std::span<std::byte> Connection::rest_of_message(std::size_t most) {
  if (session_ == nullptr || filter_.body_left() < kLeastInPlace) return {};
  const FrameHead head = filter_.head();
  if (head.type != NGHTTP2_DATA || (head.flags & NGHTTP2_FLAG_PADDED) != 0) return {};
  Call* const call = call_of(static_cast<std::int32_t>(head.stream));
  if (call == nullptr || !call->reading_) return {};
  const std::span<std::byte> room =
      call->reader_.room(socket_.waiting(), filter_.body_left(), *bytes_);
  if (room.size() < kLeastInPlace) return {};
  return room.first(std::min(room.size(), most));
}

void Connection::receive(std::span<const std::byte> bytes) {
  if (session_ == nullptr) return;
  received_end_ = bytes.data() + bytes.size();
  const bool taken = filter_.feed(
      bytes, [this](const FrameHead& head) { return judge(head); },
      [this](std::span<const std::byte> part) {
        const ssize_t result = nghttp2_session_mem_recv(
            session_.get(), reinterpret_cast<const std::uint8_t*>(part.data()), part.size());
        if (result == NGHTTP2_ERR_NOMEM) failure_ = CloseReason::kNoMemory;
        if (result == NGHTTP2_ERR_FLOODED) failure_ = CloseReason::kControlFrames;
        if (result == NGHTTP2_ERR_TOO_MANY_CONTINUATIONS) failure_ = CloseReason::kHeaderBytes;
        return result >= 0;
      });
  if (!taken) close(failure_.value_or(CloseReason::kProtocol));
}

// Counts a frame. The session may not have heard of the frames before it yet.
FrameFilter::Verdict Connection::judge(const FrameHead& head) {
  using Verdict = FrameFilter::Verdict;
  const TimePoint now = context_.loop.now();
  const auto within = [this](bool holds, CloseReason reason) {
    if (!holds) failure_ = reason;
    return holds ? Verdict::kPass : Verdict::kStop;
  };
  switch (head.type) {
    case NGHTTP2_HEADERS:
      last_stream_ = std::max(last_stream_, head.stream);
      block_bytes_ = head.length;
      break;
    case NGHTTP2_CONTINUATION: block_bytes_ += head.length; break;
    case NGHTTP2_DATA:
      if (head.length > 0 || (head.flags & NGHTTP2_FLAG_END_STREAM) != 0) return Verdict::kPass;
      return within(control_frames_.take(now), CloseReason::kControlFrames);
    case NGHTTP2_RST_STREAM:
      if (!resets_.take(now)) return within(false, CloseReason::kResets);
      return head.stream > last_stream_ ? Verdict::kDrop : Verdict::kPass;
    case NGHTTP2_PRIORITY:  // which the session does not look at
      if (head.stream == 0) return within(false, CloseReason::kProtocol);
      return within(control_frames_.take(now), CloseReason::kControlFrames);
    case NGHTTP2_PING: return within(pings_.take(now), CloseReason::kPings);
    default:
      return within(head.length <= kLongestFrame && control_frames_.take(now),
                    CloseReason::kControlFrames);
  }
  // Before they are unpacked, headers are hardly larger than what they say.
  return within(block_bytes_ <= static_cast<std::size_t>(context_.limits.max_header_bytes),
                CloseReason::kHeaderBytes);
}

// To be returned to the session, which then tells nothing more.
int Connection::fail(CloseReason reason) {
  if (!failure_.has_value()) failure_ = reason;
  return NGHTTP2_ERR_CALLBACK_FAILURE;
}

void Connection::on_turn_end() {
  if (session_ == nullptr) return;
  if (std::exchange(reads_on_, false) && (!read_some(0) || session_ == nullptr)) return;
  unpacking_steps_ = kUnpackingSteps;
  unpack();
  std::size_t written = 0;
  while (written < kBytesPerTurn) {
    if (!out_.fill(*session_, kOutgoingBytes)) {
      close(failure_.value_or(CloseReason::kNoMemory));
      return;
    }
    if (out_.waiting() == 0) {
      progress_at_ = context_.loop.now();
      break;
    }
    const Moved moved = out_.flush(socket_);
    if (moved.ended) {
      close(CloseReason::kClient);
      vanish();
      return;
    }
    if (moved.bytes > 0) progress_at_ = context_.loop.now();
    written += moved.bytes;
    if (moved.blocked) break;
  }
  if (out_.waiting() == 0) {
    if (state_ == State::kLeaving && streams_ == 0) {
      close(leaves_until_ == kNever ? CloseReason::kDrain : CloseReason::kAge);
      return;
    }
    if (nghttp2_session_want_read(session_.get()) == 0 &&
        nghttp2_session_want_write(session_.get()) == 0) {
      close(client_leaves_ ? CloseReason::kClient : CloseReason::kProtocol);
      return;
    }
  }
  if (written >= kBytesPerTurn || reads_on_) context_.loop.defer(*this);
  watch();
}

// Asks for what can be done with the socket now.
void Connection::watch() {
  const std::uint32_t wanted = socket_.events(out_.waiting() < kUnreadBytes, out_.waiting() > 0);
  if (wanted == watched_) return;
  watched_ = wanted;
  context_.loop.change(socket_.descriptor(), wanted, *this);
}

void Connection::announce_end() {
  if (state_ != State::kOpen || session_ == nullptr) return;
  nghttp2_submit_shutdown_notice(session_.get());
  context_.loop.defer(*this);
}

void Connection::leave() {
  if (state_ != State::kOpen || session_ == nullptr) return;
  state_ = State::kLeaving;
  nghttp2_submit_goaway(session_.get(), NGHTTP2_FLAG_NONE,
                        nghttp2_session_get_last_proc_stream_id(session_.get()), NGHTTP2_NO_ERROR,
                        nullptr, 0);
  context_.loop.defer(*this);
}

void Connection::close(CloseReason reason) {
  if (session_ == nullptr) return;
  context_.counters.count_closed(reason);
  if (reason != CloseReason::kClient) write_goaway(reason);
  session_.reset();
  while (calls_ != nullptr) {
    Call& call = *calls_;
    unlink(call);
    call.closed();
  }
  context_.counters.streams.fetch_sub(streams_);
  streams_ = 0;
  out_.flush(socket_);
  linger();
}

// By hand: a session that has failed says nothing more.
void Connection::write_goaway(CloseReason reason) {
  std::uint32_t error = NGHTTP2_ENHANCE_YOUR_CALM;
  if (reason == CloseReason::kDrain || reason == CloseReason::kIdle ||
      reason == CloseReason::kAge) {
    error = NGHTTP2_NO_ERROR;
  }
  if (reason == CloseReason::kProtocol) error = NGHTTP2_PROTOCOL_ERROR;
  if (reason == CloseReason::kNoMemory) error = NGHTTP2_INTERNAL_ERROR;
  constexpr std::size_t kHeadBytes = 9;
  constexpr std::uint8_t kPayloadBytes = 8;
  std::array<std::byte, kHeadBytes + kPayloadBytes> frame{};
  frame[2] = std::byte{kPayloadBytes};
  frame[3] = std::byte{NGHTTP2_GOAWAY};
  const auto last =
      static_cast<std::uint32_t>(nghttp2_session_get_last_proc_stream_id(session_.get()));
  for (std::size_t i = 0; i < 4; ++i) {
    frame[kHeadBytes + i] = static_cast<std::byte>(last >> (24 - 8 * i));
    frame[kHeadBytes + 4 + i] = static_cast<std::byte>(error >> (24 - 8 * i));
  }
  out_.append(frame);
}

// Reads on until the client has closed its side, or for a moment.
void Connection::linger() {
  state_ = State::kLingering;
  lingers_until_ = context_.loop.now() + kLinger;
  socket_.end_writing();
  watched_ = EPOLLIN;
  context_.loop.change(socket_.descriptor(), EPOLLIN, *this);
}

void Connection::vanish() {
  if (state_ == State::kGone) return;
  state_ = State::kGone;
  context_.loop.remove(socket_.descriptor(), *this);
  socket_ = Socket();
  context_.counters.connections.fetch_sub(1);
  context_.owner.gone(*this);
}

// Who is old hears of it, leaves a moment later, and is closed when its calls do not end.
void Connection::sweep_age(TimePoint now) {
  if (now >= leaves_until_) {
    close(CloseReason::kAge);
  } else if (state_ == State::kOpen && now >= notice_ends_at_) {
    leave();
    leaves_until_ = now + context_.limits.write_timeout;
  } else if (state_ == State::kOpen && now >= old_at_ && notice_ends_at_ == kNever) {
    announce_end();
    notice_ends_at_ = now + context_.limits.age_notice;
  }
}

void Connection::sweep() {
  const TimePoint now = context_.loop.now();
  const bool crowded = context_.counters.full_of_connections(now);
  const bool full = context_.counters.full_of_calls(now);
  const Limits& limits = context_.limits;
  const auto lasts = [now](TimePoint since, Duration limit, bool shorter) {
    return since != kNever && now - since > (shorter ? std::min(limit, kFullTimeout) : limit);
  };
  if (state_ == State::kLingering && now > lingers_until_) vanish();
  if (session_ == nullptr) return;
  const bool unread =
      out_.waiting() > 0 && lasts(progress_at_, limits.write_timeout, full || crowded);
  if ((!handshaken_ && lasts(begun_, limits.handshake_timeout, crowded)) ||
      lasts(block_begun_, limits.handshake_timeout, crowded)) {
    close(CloseReason::kHandshake);
  } else if (streams_ == 0 && !unread && lasts(idle_since_, limits.idle_timeout, crowded)) {
    close(CloseReason::kIdle);
  } else if (unread || !sweep_calls(now, full)) {
    close(CloseReason::kSlowReader);
  } else {
    sweep_age(now);
  }
}

}  // namespace tessera::http2
