// Things that are kept for a while, in case that somebody asks for them.
//
// Contract: any thread; functions block for microseconds. A thread that stands aside, which begins
// with the first thing, lets go of what nobody has taken in time: it calls `let_go`, which must not
// call this. The destructor waits for that thread and destroys what is left.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <deque>
#include <functional>
#include <optional>
#include <thread>
#include <utility>

#include "common/clock.h"
#include "common/mutex.h"
#include "common/stand_aside.h"

namespace tessera {

template <typename Thing>
class KeptFor {
 public:
  // `begin` is called by the thread at first, which it may name.
  KeptFor(Duration keep_for, void (*begin)(), std::function<void(Thing)> let_go)
      : keep_for_(keep_for), begin_(begin), let_go_(std::move(let_go)) {}
  ~KeptFor() {
    {
      const MutexLock lock(mutex_);
      ends_ = true;
    }
    changed_.notify_all();
    if (thread_.joinable()) thread_.join();
  }
  KeptFor(const KeptFor&) = delete;
  KeptFor& operator=(const KeptFor&) = delete;

  // Throws std::bad_alloc or, where the system gives no thread, std::system_error; the thing is
  // gone then.
  void add(Thing thing) {
    {
      const MutexLock lock(mutex_);
      if (!thread_.joinable()) thread_ = std::jthread([this] { run(); });
      kept_.push_back({.thing = std::move(thing), .until = now() + keep_for_});
    }
    changed_.notify_all();
  }

  // The oldest thing that is kept; nothing: there is none.
  std::optional<Thing> take() {
    return take([](const Thing& /*any*/) { return true; });
  }

  // The oldest one of which `is_it` says so, whose time has not ended or, with `late`, in any case.
  template <typename IsIt>
  std::optional<Thing> take(const IsIt& is_it, bool late = true) {
    const MutexLock lock(mutex_);
    const TimePoint at = now();
    const auto found = std::find_if(kept_.begin(), kept_.end(), [&](const Kept& kept) {
      return (late || kept.until > at) && is_it(kept.thing);
    });
    if (found == kept_.end()) return std::nullopt;
    std::optional<Thing> thing(std::move(found->thing));
    kept_.erase(found);
    return thing;
  }

  std::size_t size() const {
    const MutexLock lock(mutex_);
    return kept_.size();
  }

 private:
  struct Kept {
    Thing thing;
    TimePoint until;
  };

  static TimePoint now() { return std::chrono::steady_clock::now(); }

  // The next thing whose time has ended; nothing: this object ends.
  std::optional<Thing> ended() {
    const MutexLock lock(mutex_);
    while (!ends_ && (kept_.empty() || kept_.front().until > now())) {
      if (kept_.empty()) {
        changed_.wait(mutex_);
      } else {
        changed_.wait_until(mutex_, kept_.front().until);
      }
    }
    if (ends_) return std::nullopt;
    std::optional<Thing> thing(std::move(kept_.front().thing));
    kept_.pop_front();
    return thing;
  }

  void run() {
    begin_();
    stand_aside();
    while (auto thing = ended()) let_go_(std::move(*thing));
  }

  const Duration keep_for_;
  void (*const begin_)();
  const std::function<void(Thing)> let_go_;
  mutable Mutex mutex_;
  Condition changed_;
  std::deque<Kept> kept_ TESSERA_GUARDED_BY(mutex_);  // the oldest one first
  bool ends_ TESSERA_GUARDED_BY(mutex_) = false;
  std::jthread thread_;
};

}  // namespace tessera
