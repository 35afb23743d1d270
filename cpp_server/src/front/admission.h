// Admission of calls: counts those that are inside, and refuses new ones once it is shut.
//
// Contract: any thread; nothing blocks. `on_empty` is called when admission is shut and the
// last call has left, from whichever thread noticed; perhaps more than once.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <utility>

namespace tessera {

class Admission {
 public:
  explicit Admission(std::function<void()> on_empty) : on_empty_(std::move(on_empty)) {}

  // For `calls` calls at once. False: admission is shut, and none of them is inside.
  bool enter(std::int64_t calls = 1) {
    // First in, then look: shut() either sees these calls or is seen by them.
    active_.fetch_add(calls);
    if (!shut_.load()) return true;
    refused_.fetch_add(static_cast<std::uint64_t>(calls), std::memory_order_relaxed);
    leave(calls);
    return false;
  }

  void leave(std::int64_t calls = 1) {
    if (calls > 0 && active_.fetch_sub(calls) == calls && shut_.load()) on_empty_();
  }

  void shut() {
    shut_.store(true);
    if (active_.load() == 0) on_empty_();
  }

  std::int64_t active() const { return active_.load(); }

  // Calls that found it shut.
  std::uint64_t refused() const { return refused_.load(std::memory_order_relaxed); }

 private:
  std::function<void()> on_empty_;
  std::atomic<std::int64_t> active_ = 0;
  std::atomic<std::uint64_t> refused_ = 0;
  std::atomic<bool> shut_ = false;
};

}  // namespace tessera
