#include "server/log_writer.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <exception>
#include <utility>

namespace tessera {

bool RateLimit::passes(TimePoint now) {
  if (now - begin_ >= kWindow) {
    begin_ = now;
    passed_ = 0;
  }
  if (passed_ < kLinesPerSecond) {
    ++passed_;
    return true;
  }
  ++suppressed_;
  return false;
}

std::uint64_t RateLimit::take_suppressed() { return std::exchange(suppressed_, 0); }

LogWriter::LogWriter(int descriptor, SuppressedLine suppressed_line, LogPace pace)
    : descriptor_(descriptor),
      suppressed_line_(std::move(suppressed_line)),
      gather_(pace.gather),
      chunk_bytes_(std::max<std::size_t>(pace.chunk_bytes, PIPE_BUF)) {
  chunk_.reserve(chunk_bytes_);
}

bool LogWriter::push(std::string line) {
  if (closed_ || lines_.size() >= kMaxLines || line.size() > kMaxBytes - bytes_) return false;
  const std::size_t size = line.size();
  lines_.push_back(std::move(line));
  bytes_ += size;
  return true;
}

void LogWriter::put(std::string line) noexcept {
  bool queued = false;
  bool wake = false;
  try {
    const MutexLock lock(mutex_);
    queued = push(std::move(line));
    // Once: what comes until it is awake is found by it.
    wake = queued && std::exchange(waiting_, false);
  } catch (const std::exception&) {  // the queue's own memory is not to be had
    queued = false;
  }
  if (wake) changed_.notify_one();
  if (!queued) drop_line();
}

bool LogWriter::passes(std::string_view kind) noexcept {
  const TimePoint now = std::chrono::steady_clock::now();
  bool passes = false;
  bool first = false;
  try {
    const MutexLock lock(mutex_);
    auto found = limits_.find(kind);
    if (found == limits_.end()) found = limits_.emplace(kind, RateLimit{}).first;
    RateLimit& limit = found->second;
    if (now >= limit.told_at()) tell_suppressed(now);
    const bool none = limit.told_at() == kNever;
    passes = limit.passes(now);
    first = none && !passes;
  } catch (const std::exception&) {
    passes = true;  // put drops the line if there is still no memory
  }
  // The writing thread has to wake up when the window ends.
  if (first) changed_.notify_one();
  return passes;
}

bool LogWriter::tell_suppressed(TimePoint now) noexcept {
  bool told = false;
  for (auto& [kind, limit] : limits_) {
    if (limit.told_at() == kNever || now < limit.told_at()) continue;
    const std::uint64_t lines = limit.take_suppressed();
    told = true;
    try {
      if (push(suppressed_line_(kind, lines))) continue;
    } catch (const std::exception&) {  // no memory for the line
    }
    drop_line();
  }
  return told;
}

std::size_t LogWriter::take() {
  chunk_.clear();
  std::size_t count = 0;
  while (!lines_.empty() && (count == 0 || chunk_.size() + lines_.front().size() <= chunk_bytes_)) {
    std::string& line = lines_.front();
    bytes_ -= line.size();
    if (line.size() > chunk_bytes_) {
      chunk_.swap(line);
    } else {
      chunk_ += line;  // has room for it
    }
    lines_.pop_front();
    ++count;
  }
  return count;
}

bool LogWriter::written(std::string_view chunk) const {
  while (!chunk.empty()) {
    const ssize_t count = ::write(descriptor_, chunk.data(), chunk.size());
    if (count >= 0) {
      chunk.remove_prefix(static_cast<std::size_t>(count));
    } else if (errno == EAGAIN) {  // somebody who shares the descriptor wants it so
      pollfd polled{descriptor_, POLLOUT, 0};
      ::poll(&polled, 1, -1);
    } else if (errno != EINTR) {
      return false;
    }
  }
  return true;
}

void LogWriter::wait() {
  TimePoint until = kNever;
  for (const auto& [kind, limit] : limits_) until = std::min(until, limit.told_at());
  waiting_ = true;
  if (until == kNever) {
    changed_.wait(mutex_);
  } else if (!tell_suppressed(std::chrono::steady_clock::now())) {
    changed_.wait_until(mutex_, until);
  }
  waiting_ = false;
}

void LogWriter::gather() {
  const TimePoint until = std::chrono::steady_clock::now() + gather_;
  while (!closed_ && flushes_ == 0 && std::chrono::steady_clock::now() < until) {
    changed_.wait_until(mutex_, until);
  }
}

void LogWriter::run() noexcept {
  while (true) {
    std::size_t lines = 0;
    {
      const MutexLock lock(mutex_);
      writing_ = false;
      if (lines_.empty()) {
        idle_.notify_all();
        if (closed_) return;
        wait();
        if (!lines_.empty()) gather();
      }
      lines = take();
      writing_ = lines > 0;
    }
    if (lines > 0 && !written(chunk_)) dropped_.fetch_add(lines, std::memory_order_relaxed);
  }
}

void LogWriter::flush(Duration limit) {
  const TimePoint until = std::chrono::steady_clock::now() + limit;
  const MutexLock lock(mutex_);
  tell_suppressed(kNever);
  ++flushes_;
  changed_.notify_one();
  while ((!lines_.empty() || writing_) && std::chrono::steady_clock::now() < until) {
    idle_.wait_until(mutex_, until);
  }
  --flushes_;
}

void LogWriter::close() {
  const MutexLock lock(mutex_);
  closed_ = true;
  changed_.notify_one();
}

}  // namespace tessera
