// A reader-writer lock for what is read all the time and seldom changed: many threads hold it at
// once, or one alone. Who wants it alone is preferred: from when it asks nobody else gets it, so
// that it waits for no longer than those hold it who have it by then.
//
// How: a reader counts itself in, in a counter that it shares with few other threads,
// and then looks whether somebody is alone; who wants to be says so and then looks at the counters.
// These four operations are sequentially consistent, so one of the two sees the other. Taking it
// and giving it back cost a reader two additions on a cache line that few other threads write to,
// some 10 ns; the mutex is touched only while somebody is alone, or waits to be.
//
// Contract: any thread. A thread that holds it must not ask for it again: it would wait for itself.
// A reader sees what was written before by who had it alone.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>

#include "common/mutex.h"
#include "common/thread_slot.h"

namespace tessera {

class ReaderWriterLock {
 public:
  // Blocks while somebody has it alone, or waits for that. Gives what unlock_shared takes.
  std::size_t lock_shared() {
    const std::size_t slot = slot_of_thread();
    while (true) {
      readers_[slot].count.fetch_add(1);
      if (!alone_.load()) return slot;
      unlock_shared(slot);
      wait_for_writer();
    }
  }

  void unlock_shared(std::size_t slot) {
    readers_[slot].count.fetch_sub(1);
    if (alone_.load()) tell();
  }

  // Blocks until nobody else has it.
  void lock();
  void unlock();

 private:
  bool anybody() const;
  void wait_for_writer();
  void tell();

  std::array<ThreadSlot, kThreadSlots> readers_;
  std::atomic<bool> alone_ = false;
  Mutex mutex_;
  Condition changed_;
};

// Holds a lock together with others, for as long as it lives; null: nothing.
class SharedHold {
 public:
  explicit SharedHold(ReaderWriterLock* lock)
      : lock_(lock), slot_(lock == nullptr ? 0 : lock->lock_shared()) {}
  ~SharedHold() {
    if (lock_ != nullptr) lock_->unlock_shared(slot_);
  }
  SharedHold(const SharedHold&) = delete;
  SharedHold& operator=(const SharedHold&) = delete;

 private:
  ReaderWriterLock* const lock_;
  const std::size_t slot_;
};

// Holds a lock alone, for as long as it lives.
class ExclusiveHold {
 public:
  explicit ExclusiveHold(ReaderWriterLock& lock) : lock_(lock) { lock_.lock(); }
  ~ExclusiveHold() { lock_.unlock(); }
  ExclusiveHold(const ExclusiveHold&) = delete;
  ExclusiveHold& operator=(const ExclusiveHold&) = delete;

 private:
  ReaderWriterLock& lock_;
};

}  // namespace tessera
