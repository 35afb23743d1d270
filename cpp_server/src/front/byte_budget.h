// How many bytes of requests and answers may be inside the server at once.
//
// Contract: any thread; nothing blocks. Who has taken bytes gives them back once.
#pragma once

#include <atomic>
#include <cstdint>

namespace tessera {

class ByteBudget {
 public:
  explicit ByteBudget(std::int64_t limit) : limit_(limit) {}
  ByteBudget(const ByteBudget&) = delete;
  ByteBudget& operator=(const ByteBudget&) = delete;

  // False: there is no room, and nothing was taken.
  bool take(std::int64_t bytes) {
    if (held_.fetch_add(bytes, std::memory_order_relaxed) <= limit_ - bytes) return true;
    give(bytes);
    return false;
  }

  void give(std::int64_t bytes) { held_.fetch_sub(bytes, std::memory_order_relaxed); }

  std::int64_t limit() const { return limit_; }
  std::int64_t held() const { return held_.load(std::memory_order_relaxed); }

 private:
  const std::int64_t limit_;
  std::atomic<std::int64_t> held_ = 0;
};

}  // namespace tessera
