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

  // False: admission is shut, and the caller is not inside.
  bool enter() {
    // First in, then look: shut() either sees this call or is seen by it.
    active_.fetch_add(1);
    if (!shut_.load()) return true;
    refused_.fetch_add(1, std::memory_order_relaxed);
    leave();
    return false;
  }

  void leave() {
    if (active_.fetch_sub(1) == 1 && shut_.load()) on_empty_();
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
