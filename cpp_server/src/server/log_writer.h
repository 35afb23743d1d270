// The queue between those who log and the thread that writes, and the limit on repeated warnings.
//
// Contract: every method may be called from any thread; nothing but flush and run blocks. Who makes
// a LogWriter runs `run` on a thread of its own, which shares the ownership.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <utility>

#include "common/clock.h"
#include "common/mutex.h"

namespace tessera {

// Lines of one kind: the first ten of a second pass, the rest are counted.
class RateLimit {
 public:
  static constexpr int kLinesPerSecond = 10;
  static constexpr Duration kWindow = std::chrono::seconds(1);

  // Whether a line passes at `now`. take_suppressed comes first where a window is over.
  bool passes(TimePoint now);

  // When suppressed lines are to be told of; kNever: there are none.
  TimePoint told_at() const { return suppressed_ > 0 ? begin_ + kWindow : kNever; }

  // How many lines have been suppressed since the last call.
  std::uint64_t take_suppressed();

 private:
  TimePoint begin_{};
  int passed_ = 0;
  std::uint64_t suppressed_ = 0;
};

// How lines leave.
struct LogPace {
  Duration gather{0};           // what the first line waits for others
  std::size_t chunk_bytes = 0;  // of lines that are written at once; 0: PIPE_BUF
};

class LogWriter {
 public:
  // What waits for the writing thread at most: at 200 bytes a line some seconds of debug lines.
  static constexpr std::size_t kMaxLines = 8'192;
  static constexpr std::size_t kMaxBytes = 4 * 1024 * 1024;

  // `suppressed_line` makes the line that says how many lines of a kind were suppressed.
  using SuppressedLine = std::function<std::string(std::string_view kind, std::uint64_t lines)>;

  LogWriter(int descriptor, SuppressedLine suppressed_line, LogPace pace = {});

  // `line` ends with a newline.
  void put(std::string line) noexcept;

  // Whether another line of `kind` may be put.
  bool passes(std::string_view kind) noexcept;

  // A line that was to be written and could not even be made.
  void drop_line() noexcept { dropped_.fetch_add(1, std::memory_order_relaxed); }

  std::uint64_t dropped_lines() const { return dropped_.load(std::memory_order_relaxed); }

  // Waits until everything queued has been written, or `limit` has passed.
  void flush(Duration limit);

  // Lets run return once the queue is empty.
  void close();

  // Writes until close. Blocks as long as the descriptor does.
  void run() noexcept;

 private:
  // Moves lines from the queue into chunk_: several of them while they are at most chunk_bytes_
  // (of PIPE_BUF pipes take the whole). Returns how many. Allocates nothing.
  std::size_t take() TESSERA_REQUIRES(mutex_);
  // The writing thread's wait; puts the lines about suppressed ones that are due.
  void wait() TESSERA_REQUIRES(mutex_);
  // Waits for lines that are to be written with the first one.
  void gather() TESSERA_REQUIRES(mutex_);
  // Whether a line about suppressed ones was due.
  bool tell_suppressed(TimePoint now) noexcept TESSERA_REQUIRES(mutex_);
  bool push(std::string line) TESSERA_REQUIRES(mutex_);
  bool written(std::string_view chunk) const;

  const int descriptor_;
  const SuppressedLine suppressed_line_;
  const Duration gather_;
  const std::size_t chunk_bytes_;
  std::string chunk_;  // what the writing thread writes
  std::atomic<std::uint64_t> dropped_ = 0;
  Mutex mutex_;
  Condition changed_;  // for the writing thread
  Condition idle_;     // for flush
  std::deque<std::string> lines_ TESSERA_GUARDED_BY(mutex_);
  std::size_t bytes_ TESSERA_GUARDED_BY(mutex_) = 0;
  bool writing_ TESSERA_GUARDED_BY(mutex_) = false;
  bool waiting_ TESSERA_GUARDED_BY(mutex_) = false;  // the writing thread, for a line
  int flushes_ TESSERA_GUARDED_BY(mutex_) = 0;       // that go on
  bool closed_ TESSERA_GUARDED_BY(mutex_) = false;
  std::map<std::string, RateLimit, std::less<>> limits_ TESSERA_GUARDED_BY(mutex_);
};

}  // namespace tessera
