// What clients may make the server hold or do, and what it counts of them.
//
// Contract: Limits is a plain value that does not change once connections use it. Counters may be
// used by any thread and never block; they outlive every connection.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "common/clock.h"
#include "common/enums.h"

namespace tessera::http2 {

struct Limits {
  // Connections at a time; more of them wait in the system's queue.
  int max_connections = 4'096;
  // Calls at a time: of one connection, and of all together. A connection may have kOwnStreams
  // calls whatever the others have.
  int max_connection_streams = 1'000;
  int max_streams = 16'384;
  // Names and values of a call's headers, each pair counted with 32 bytes more (RFC 9113, 6.5.2).
  int max_header_bytes = 16'384;
  // Frames of a connection that carry nothing of a call (SETTINGS, PRIORITY, WINDOW_UPDATE, empty
  // DATA), each second, and PINGs, which each want an answer; every answer to a call allows
  // kFramesPerAnswer more of both.
  int max_control_frames_per_s = 1'000;
  int max_pings_per_s = 1'000;
  // Calls of a connection that come to nothing, each second: the client ends them before they are
  // answered, or their headers are those of no method.
  int max_resets_per_s = 200;
  // From the connection to the client's first SETTINGS, and for each block of headers.
  Duration handshake_timeout = std::chrono::seconds(10);
  // For a call's message to come whole, and for an answer to be read; kLeastBytesPerS on top.
  Duration message_timeout = std::chrono::seconds(30);
  Duration write_timeout = std::chrono::seconds(30);
  // How long a connection may be without a call.
  Duration idle_timeout = std::chrono::hours(1);
  // After so long, a tenth more or less so that not all go at once, a connection is to be made
  // anew, by which clients find servers that were added; zero: never. Its client hears of it
  // `age_notice` before further calls are not heard; calls that are open then have `write_timeout`.
  Duration max_age{0};
  Duration age_notice = std::chrono::seconds(1);
  // The largest message; and what is held of messages that have come in part, and of answers that
  // are not scores.
  std::int64_t max_message_bytes = 64 * 1024 * 1024;
  std::int64_t max_buffered_bytes = std::int64_t{1} << 30;
};

inline constexpr int kOwnStreams = 8;
inline constexpr int kFramesPerAnswer = 4;
// A burst may have what several seconds may.
inline constexpr int kBurstSeconds = 10;
// Who sends or reads a message at this rate is not slow, however large it is.
inline constexpr std::int64_t kLeastBytesPerS = 64 * 1024;
// While somebody has to wait or is refused for want of room, whoever is slow has no longer than
// this.
inline constexpr Duration kFullTimeout = std::chrono::seconds(2);

// Why a connection was closed: the `reason` label of tessera_connections_closed_total.
enum class CloseReason {
  kClient,         // the client closed it
  kDrain,          // the server ends
  kIdle,           // no call for too long
  kAge,            // it was as old as one may be
  kHandshake,      // half a preface or half a block of headers for too long
  kHeaderBytes,    // more headers than a call may have
  kControlFrames,  // too many frames that carry nothing
  kPings,          // too many PINGs
  kResets,         // too many calls that came to nothing
  kSlowReader,     // answers that are not read
  kProtocol,       // what HTTP/2 does not allow
  kNoMemory,       // none was left for it
  kTls,  // it ended before TLS was agreed upon, as without the certificate that is asked for
  kNoDescriptor,  // none was left: it was accepted and closed at once
};
inline constexpr auto kCloseReasonNames = std::to_array<std::string_view>(
    {"client", "drain", "idle", "age", "handshake", "header_bytes", "control_frames", "pings",
     "resets", "slow_reader", "protocol", "no_memory", "tls", "no_descriptor"});
static_assert(kCloseReasonNames.size() == enum_size<CloseReason::kNoDescriptor>());

class Counters {
 public:
  std::atomic<std::int64_t> connections = 0;
  std::atomic<std::int64_t> streams = 0;
  std::array<std::atomic<std::uint64_t>, kCloseReasonNames.size()> closed{};

  void count_closed(CloseReason reason) {
    closed[static_cast<std::size_t>(reason)].fetch_add(1, std::memory_order_relaxed);
  }

  // Takes room for bytes of messages that have come in part, and of answers that are not scores.
  // False: there is none.
  bool take_bytes(std::int64_t bytes, std::int64_t limit) {
    if (held_.fetch_add(bytes, std::memory_order_relaxed) <= limit - bytes) return true;
    give_bytes(bytes);
    return false;
  }
  void give_bytes(std::int64_t bytes) { held_.fetch_sub(bytes, std::memory_order_relaxed); }
  std::int64_t held_bytes() const { return held_.load(std::memory_order_relaxed); }

  // A connection had to wait, or a call was refused, for want of room: until a second after it,
  // what is slow has kFullTimeout.
  void note_full_of_connections(TimePoint now) { note(connections_full_at_, now); }
  void note_full_of_calls(TimePoint now) { note(calls_full_at_, now); }
  bool full_of_connections(TimePoint now) const { return recent(connections_full_at_, now); }
  bool full_of_calls(TimePoint now) const { return recent(calls_full_at_, now); }

 private:
  using Instant = std::atomic<std::int64_t>;

  static void note(Instant& instant, TimePoint now) {
    instant.store(now.time_since_epoch().count(), std::memory_order_relaxed);
  }
  static bool recent(const Instant& instant, TimePoint now) {
    const TimePoint at{Duration(instant.load(std::memory_order_relaxed))};
    return now - at < std::chrono::seconds(1);
  }

  std::atomic<std::int64_t> held_ = 0;
  Instant connections_full_at_ = -std::chrono::nanoseconds(std::chrono::hours(1)).count();
  Instant calls_full_at_ = -std::chrono::nanoseconds(std::chrono::hours(1)).count();
};

// So many of something a second, and at first kBurstSeconds as many. Plain state of one thread.
class RateLimit {
 public:
  RateLimit(int per_second, TimePoint now)
      : per_second_(per_second), left_(static_cast<double>(per_second) * kBurstSeconds), at_(now) {}

  // False: there were more than may be.
  bool take(TimePoint now) {
    if (left_ < 1) refill(now);
    left_ -= 1;
    return left_ >= 0;
  }

  void give(int more) { left_ = capped(left_ + more); }

 private:
  double capped(double tokens) const {
    const double most = static_cast<double>(per_second_) * kBurstSeconds;
    return tokens < most ? tokens : most;
  }
  void refill(TimePoint now) {
    left_ = capped(left_ + seconds(now - at_) * per_second_);
    at_ = now;
  }

  const int per_second_;
  double left_;
  TimePoint at_;
};

}  // namespace tessera::http2
