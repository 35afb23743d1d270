#include "http2/message_reader.h"

#include <algorithm>

namespace tessera::http2 {
namespace {

constexpr std::size_t kLeastGrowth = 16 * 1024;

}  // namespace

MessageReader::State MessageReader::feed(std::span<const std::byte>& data, const Limits& limits,
                                         Counters& counters) {
  while (prefix_bytes_ < kPrefixBytes) {
    if (data.empty()) return State::kMore;
    prefix_[prefix_bytes_++] = data.front();
    data = data.subspan(1);
    if (prefix_bytes_ < kPrefixBytes) continue;
    if (prefix_[0] != std::byte{0}) return State::kCompressed;
    announced_ = size_of(prefix_);
    if (announced_ > limits.max_message_bytes) return State::kTooLarge;
  }
  const std::size_t now = std::min<std::size_t>(data.size(), announced_ - message_.size());
  const State grown = grow(now, limits, counters);
  if (grown != State::kMore) return grown;
  message_.append(data.first(now));
  data = data.subspan(now);
  if (message_.size() < announced_) return State::kMore;
  settle(counters);
  return State::kWhole;
}

// Makes room for `now` bytes more.
MessageReader::State MessageReader::grow(std::size_t now, const Limits& limits,
                                         Counters& counters) {
  const std::size_t needed = message_.size() + now;
  if (needed == announced_ && accounted_ == 0) {
    return message_.reserve(needed) ? State::kMore : State::kNoMemory;
  }
  // Doubled, so that what is moved is at most what has come.
  const std::size_t capacity =
      std::min<std::size_t>(announced_, std::max({2 * message_.size(), needed, kLeastGrowth}));
  const std::int64_t more = static_cast<std::int64_t>(capacity) - accounted_;
  if (needed > static_cast<std::size_t>(accounted_)) {
    if (!counters.take_bytes(more, limits.max_buffered_bytes)) return State::kFull;
    accounted_ += more;
  }
  if (needed <= message_.capacity()) return State::kMore;
  return message_.reserve(capacity) ? State::kMore : State::kNoMemory;
}

void MessageReader::settle(Counters& counters) {
  if (accounted_ > 0) counters.give_bytes(accounted_);
  accounted_ = 0;
}

void MessageReader::next() {
  prefix_bytes_ = 0;
  announced_ = 0;
  message_.clear();
}

void MessageReader::reset(std::size_t kept_bytes, Counters& counters) {
  next();
  settle(counters);
  if (message_.capacity() > kept_bytes) message_.free();
}

}  // namespace tessera::http2
