// A mutex whose use Clang checks while it compiles (-Wthread-safety, cpp_server/check.py): what is
// GUARDED_BY it cannot be touched without it. To other compilers the annotations are nothing.
// https://clang.llvm.org/docs/ThreadSafetyAnalysis.html
//
// Contract: Mutex is a std::mutex and Condition a std::condition_variable, with their rules. Who
// finds a Mutex taken tries again for about a microsecond before the system is asked to wait: what
// is done under one takes less, and many threads that sleep and wake for it use more of the CPUs
// than they wait.
#pragma once

#include <condition_variable>
#include <mutex>

#include "common/clock.h"

#if defined(__clang__)
#define TESSERA_ANNOTATION(x) __attribute__((x))
#else
#define TESSERA_ANNOTATION(x)
#endif

#define TESSERA_GUARDED_BY(mutex) TESSERA_ANNOTATION(guarded_by(mutex))
#define TESSERA_REQUIRES(mutex) TESSERA_ANNOTATION(requires_capability(mutex))

namespace tessera {

class TESSERA_ANNOTATION(capability("mutex")) Mutex {
 public:
  void lock() TESSERA_ANNOTATION(acquire_capability()) {
    for (int i = 0; i < kTries; ++i) {
      if (mutex_.try_lock()) return;
      relax();
    }
    mutex_.lock();
  }
  bool try_lock() TESSERA_ANNOTATION(try_acquire_capability(true)) { return mutex_.try_lock(); }
  void unlock() TESSERA_ANNOTATION(release_capability()) { mutex_.unlock(); }
  // Says that the calling thread holds it, where the analysis cannot see that; checks nothing.
  void assert_held() const TESSERA_ANNOTATION(assert_capability(this)) {}

 private:
  friend class Condition;

  static constexpr int kTries = 24;  // with pauses of some 40 ns

  static void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("isb");
#endif
  }

  std::mutex mutex_;
};

// Holds a mutex from its construction until release or its end.
class TESSERA_ANNOTATION(scoped_lockable) MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) TESSERA_ANNOTATION(acquire_capability(mutex)) : mutex_(mutex) {
    mutex_.lock();
  }
  ~MutexLock() TESSERA_ANNOTATION(release_capability()) {
    if (held_) mutex_.unlock();
  }
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

  void release() TESSERA_ANNOTATION(release_capability()) {
    held_ = false;
    mutex_.unlock();
  }

 private:
  Mutex& mutex_;
  bool held_ = true;
};

class Condition {
 public:
  void notify_one() { condition_.notify_one(); }
  void notify_all() { condition_.notify_all(); }

  void wait(Mutex& mutex) TESSERA_REQUIRES(mutex) {
    std::unique_lock lock(mutex.mutex_, std::adopt_lock);
    condition_.wait(lock);
    lock.release();  // it stays the caller's
  }
  void wait_until(Mutex& mutex, TimePoint time) TESSERA_REQUIRES(mutex) {
    std::unique_lock lock(mutex.mutex_, std::adopt_lock);
    condition_.wait_until(lock, time);
    lock.release();
  }

 private:
  std::condition_variable condition_;
};

}  // namespace tessera
