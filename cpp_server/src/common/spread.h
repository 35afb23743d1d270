// One T for each slot of threads (thread_slot.h), so that counting threads seldom share a cache
// line: on a host with many CPUs a counter that all of them change costs each more than what it
// counts.
//
// Contract: T is aligned to a cache line and may be used from several threads at once, for a slot
// may have more threads than one. mine and each may be called from any thread and do not block. A T
// is made when a thread first asks for it; where there is no memory for it, the thread uses the
// first.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <new>

#include "common/thread_slot.h"

namespace tessera {

template <typename T>
class Spread {
  static_assert(alignof(T) >= 64);

 public:
  Spread() = default;
  ~Spread() {
    for (const auto& slot : slots_) delete slot.load(std::memory_order_relaxed);
  }
  Spread(const Spread&) = delete;
  Spread& operator=(const Spread&) = delete;

  // The calling thread's.
  T& mine() {
    std::atomic<T*>& slot = slots_[slot_of_thread()];
    T* const own = slot.load(std::memory_order_acquire);
    return own != nullptr ? *own : make(slot);
  }

  // Calls `use` with each that was made.
  template <typename Use>
  void each(const Use& use) const {
    use(first_);
    for (const auto& slot : slots_) {
      const T* const one = slot.load(std::memory_order_acquire);
      if (one != nullptr) use(*one);
    }
  }

  // The sum of what `part` gives for each that was made.
  template <typename Part>
  auto sum(const Part& part) const {
    decltype(part(first_)) all{};
    each([&](const T& one) { all += part(one); });
    return all;
  }

 private:
  T& make(std::atomic<T*>& slot) {
    T* const made = new (std::nothrow) T();
    if (made == nullptr) return first_;
    T* other = nullptr;
    if (slot.compare_exchange_strong(other, made, std::memory_order_acq_rel)) return *made;
    delete made;
    return *other;
  }

  T first_;  // of threads for which there was no memory
  std::array<std::atomic<T*>, kThreadSlots> slots_{};
};

}  // namespace tessera
