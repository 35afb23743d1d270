#include "http2/message_reader.h"

#include <algorithm>
#include <utility>

namespace tessera::http2 {
namespace {

constexpr std::size_t kLeastGrowth = 16 * 1024;

}  // namespace

MessageReader::State MessageReader::feed(std::span<const std::byte>& data, ConnectionBytes& bytes,
                                         std::size_t ahead) {
  while (prefix_bytes_ < kPrefixBytes) {
    if (data.empty()) return State::kMore;
    prefix_[prefix_bytes_++] = data.front();
    data = data.subspan(1);
    if (prefix_bytes_ < kPrefixBytes) continue;
    if (prefix_[0] > std::byte{1}) return State::kWrongFlag;
    announced_ = size_of(prefix_);
    if (announced_ > bytes.limits().max_message_bytes) return State::kTooLarge;
  }
  const std::size_t now = std::min<std::size_t>(data.size(), announced_ - message_.size());
  const State grown = grow(now, ahead, bytes);
  if (grown != State::kMore) return grown;
  if (now > 0 && data.data() == message_.end()) {  // it was read to its `room`
    message_.extend(now);
  } else {
    message_.append(data.first(now));
  }
  data = data.subspan(now);
  if (message_.size() < announced_) return State::kMore;
  if (compressed()) {  // it may have to wait
    const State held = account(message_.capacity(), bytes);
    return held == State::kMore ? State::kWhole : held;
  }
  settle(bytes);
  return State::kWhole;
}

std::span<std::byte> MessageReader::room(std::size_t here, std::size_t most,
                                         ConnectionBytes& bytes) {
  if (prefix_bytes_ < kPrefixBytes) return {};
  most = std::min<std::size_t>(most, announced_ - message_.size());
  const std::size_t now = std::min(here, most);
  if (now == 0 || grow(now, 0, bytes) != State::kMore) return {};
  // More may come meanwhile, for which there is room without growing.
  const std::size_t taken = std::min(message_.capacity(), static_cast<std::size_t>(accounted_));
  const std::size_t more = taken > message_.size() ? taken - message_.size() : 0;
  return {message_.end(), std::min(most, std::max(now, more))};
}

// Makes room for `now` bytes more, behind which there may be as much of the message as `ahead`.
MessageReader::State MessageReader::grow(std::size_t now, std::size_t ahead,
                                         ConnectionBytes& bytes) {
  const std::size_t needed = message_.size() + now;
  if (needed == announced_ && accounted_ == 0) {
    return message_.reserve(needed) ? State::kMore : State::kNoMemory;
  }
  // Doubled, so that what is moved is at most what has come.
  const std::size_t capacity = std::min<std::size_t>(
      announced_, std::max({2 * message_.size(), needed + ahead, kLeastGrowth}));
  if (needed > static_cast<std::size_t>(accounted_)) {
    const State held = account(capacity, bytes);
    if (held != State::kMore) return held;
  }
  if (needed <= message_.capacity()) return State::kMore;
  return message_.reserve(capacity) ? State::kMore : State::kNoMemory;
}

// Accounts `capacity` bytes in all.
MessageReader::State MessageReader::account(std::size_t capacity, ConnectionBytes& bytes) {
  const std::int64_t more = static_cast<std::int64_t>(capacity) - accounted_;
  if (more <= 0) return State::kMore;
  using Room = ConnectionBytes::Room;
  switch (bytes.take(more)) {
    case Room::kTaken: accounted_ += more; return State::kMore;
    case Room::kConnectionFull: return State::kConnectionFull;
    case Room::kServerFull: return State::kServerFull;
  }
  return State::kServerFull;
}

void MessageReader::settle(ConnectionBytes& bytes) {
  if (accounted_ > 0) bytes.give(accounted_);
  accounted_ = 0;
}

void MessageReader::replace(Buffer unpacked, ConnectionBytes& bytes) {
  settle(bytes);
  message_ = std::move(unpacked);
}

void MessageReader::next() {
  prefix_bytes_ = 0;
  announced_ = 0;
  message_.clear();
}

void MessageReader::reset(std::size_t kept_bytes, ConnectionBytes& bytes) {
  next();
  settle(bytes);
  if (message_.capacity() > kept_bytes) message_.free();
}

}  // namespace tessera::http2
