// The memory that one connection's messages and answers take, of what all connections may.
//
// Contract: shared by a connection and its calls, which may outlive it; `counters` outlive both.
// take and give belong to the loop's thread; `requests` says for itself who may use it.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/byte_share.h"
#include "http2/limits.h"

namespace tessera::http2 {

class ConnectionBytes {
 public:
  enum class Room {
    kTaken,
    kConnectionFull,  // this connection has its share
    kServerFull,      // all connections together have what they may
  };

  ConnectionBytes(const Limits& limits, Counters& counters)
      : limits_(limits),
        counters_(counters),
        messages_(std::max(limits.max_buffered_bytes / kConnectionShare, limits.max_message_bytes)),
        requests_(limits.max_buffered_bytes / kConnectionShare) {}

  // Takes room for bytes of messages that have come in part, or are packed, and of answers that are
  // not scores. What is not kTaken has taken nothing.
  Room take(std::int64_t bytes) {
    if (!messages_.take(bytes)) return Room::kConnectionFull;
    if (counters_.take_bytes(bytes, limits_.max_buffered_bytes)) return Room::kTaken;
    messages_.give(bytes);
    return Room::kServerFull;
  }

  void give(std::int64_t bytes) {
    messages_.give(bytes);
    counters_.give_bytes(bytes);
  }

  // A call was refused because all connections together have what they may.
  void note_full(TimePoint now) { counters_.note_full_of_calls(now); }

  std::int64_t held() const { return messages_.held(); }
  std::int64_t most() const { return messages_.most(); }

  // What the connection's calls for scores hold of a budget as large as max_buffered_bytes.
  ByteShare& requests() { return requests_; }

  const Limits& limits() const { return limits_; }

 private:
  const Limits limits_;  // a copy: calls may outlive what the connection refers to
  Counters& counters_;
  ByteShare messages_;
  ByteShare requests_;
};

}  // namespace tessera::http2
