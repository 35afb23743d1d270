// What one connection holds of a budget of bytes: at most so many, so that it does not fill alone
// what all have. Who holds nothing may take any number at once, so that no single request is too
// large for a share.
//
// Contract: any thread gives, one thread takes; nothing blocks. Who has taken bytes gives them back
// once.
#pragma once

#include <atomic>
#include <cstdint>

namespace tessera {

// A connection's share of a budget is the budget divided by this.
inline constexpr std::int64_t kConnectionShare = 2;

class ByteShare {
 public:
  explicit ByteShare(std::int64_t most) : most_(most) {}
  ByteShare(const ByteShare&) = delete;
  ByteShare& operator=(const ByteShare&) = delete;

  // False: it would be more than the share, and nothing was taken.
  bool take(std::int64_t bytes) {
    const std::int64_t before = held_.fetch_add(bytes, std::memory_order_relaxed);
    if (before == 0 || before <= most_ - bytes) return true;
    give(bytes);
    return false;
  }

  void give(std::int64_t bytes) { held_.fetch_sub(bytes, std::memory_order_relaxed); }

  std::int64_t most() const { return most_; }
  std::int64_t held() const { return held_.load(std::memory_order_relaxed); }

 private:
  const std::int64_t most_;
  std::atomic<std::int64_t> held_ = 0;
};

}  // namespace tessera
