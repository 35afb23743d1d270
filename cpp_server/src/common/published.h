// A value that many threads read and that a few replace as a whole: readers see the old value or
// the new one, and neither wait nor make anybody wait for a lock.
//
// How: a reader counts itself in, in a counter that it shares with few other threads, before it
// looks at the pointer; a writer exchanges the pointer and then waits until each counter has been
// zero once. All four operations are sequentially consistent, so a reader that a writer does not
// see sees the writer's value. A lock instead would be held, now and then, by a thread of low
// priority that is not running.
//
// Contract: read may be called from any thread, not from within `look`; replace blocks for as long
// as reads last that have begun before it. Values are destroyed by the thread that replaces them,
// or by the destructor.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <thread>
#include <utility>

#include "common/thread_slot.h"

namespace tessera {

template <typename T>
class Published {
 public:
  explicit Published(std::unique_ptr<const T> first) : value_(first.release()) {}
  ~Published() { delete value_.load(); }
  Published(const Published&) = delete;
  Published& operator=(const Published&) = delete;

  // What `look`, which should take microseconds, gives for the value.
  template <typename Look>
  auto read(const Look& look) const {
    const Inside inside(readers_[slot_of_thread()].count);
    return look(*value_.load());
  }

  // From when this returns nobody sees the former value.
  void replace(std::unique_ptr<const T> next) {
    const std::unique_ptr<const T> former(value_.exchange(next.release()));
    for (const ThreadSlot& slot : readers_) {
      while (slot.count.load() != 0) std::this_thread::sleep_for(kPatience);
    }
  }

 private:
  static constexpr std::chrono::microseconds kPatience{20};

  class Inside {
   public:
    explicit Inside(std::atomic<std::uint32_t>& count) : count_(count) { count_.fetch_add(1); }
    ~Inside() { count_.fetch_sub(1); }
    Inside(const Inside&) = delete;
    Inside& operator=(const Inside&) = delete;

   private:
    std::atomic<std::uint32_t>& count_;
  };

  std::atomic<const T*> value_;
  mutable std::array<ThreadSlot, kThreadSlots> readers_;
};

}  // namespace tessera
