// One thread's loop over sockets, timers and work that other threads hand to it.
//
// A turn of the loop is: wait for events, handle each, run what other threads have posted, run the
// timers that are due, then run once what was deferred to the end of the turn. Whoever has bytes to
// write defers that, so that a turn's answers leave in one write.
//
// Contract: run is called by one thread, which is the loop's. post, stop and on_thread may be
// called by any thread; everything else by the loop's thread, or by one thread before run and after
// it. Nothing blocks but run. The loop owns no handler, task or timer: a handler is removed before
// its descriptor is closed, a timer is cancelled and a deferred one forgotten before they are
// destroyed, and a posted task lives until it has run. The loop outlives every call of post: a
// thread may be inside of it still when its task has run. Exceptions from handlers leave run.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "common/clock.h"

struct epoll_event;

namespace tessera::http2 {

class EventLoop {
 public:
  // What waits for a descriptor.
  class Handler {
   public:
    virtual ~Handler() = default;
    // `events` are epoll's: EPOLLIN, EPOLLOUT, EPOLLERR, EPOLLHUP. They are told again in the next
    // turn as long as they hold.
    virtual void on_ready(std::uint32_t events) = 0;
  };

  // Work of another thread for the loop's. It may be posted again once it has begun to run.
  class Task {
   public:
    virtual ~Task() = default;
    virtual void run() = 0;

   private:
    friend class EventLoop;
    Task* next_ = nullptr;
  };

  // What is run once at the end of a turn, however often it was deferred in it.
  class Deferred {
   public:
    virtual ~Deferred() = default;
    virtual void on_turn_end() = 0;

   private:
    friend class EventLoop;
    bool deferred_ = false;
  };

  class Timer {
   public:
    explicit Timer(std::function<void()> action) : action_(std::move(action)) {}

   private:
    friend class EventLoop;
    std::function<void()> action_;
    TimePoint due_ = kNever;  // kNever: not scheduled
  };

  // Throws std::system_error where the system has no descriptor for it.
  EventLoop();
  ~EventLoop();
  EventLoop(const EventLoop&) = delete;
  EventLoop& operator=(const EventLoop&) = delete;

  // Runs turns until stop; what was posted before stop has then been run.
  void run();
  void stop();

  // Watches `descriptor` for `events`. False where the system has no room for one more.
  bool add(int descriptor, std::uint32_t events, Handler& handler);
  void change(int descriptor, std::uint32_t events, Handler& handler);
  // `handler` hears no more of `descriptor`, not even of an event of this turn.
  void remove(int descriptor, Handler& handler);

  // Runs `task` on the loop's thread, in the order of posting. A loop that sleeps is woken, by the
  // first task that comes while it does.
  void post(Task& task);

  void defer(Deferred& deferred);
  void forget(Deferred& deferred);

  // Runs the timer's action once, at `due` or soon after; a timer that waits is moved.
  void schedule(Timer& timer, TimePoint due);
  void cancel(Timer& timer);

  // When this turn began.
  TimePoint now() const { return now_; }

  // How many handlers have something to do in this turn, at least one.
  std::size_t ready() const { return ready_; }

  bool on_thread() const { return std::this_thread::get_id() == thread_.load(); }

 private:
  int wait(std::span<epoll_event> events);
  void wake();
  void run_posted();
  void run_timers();
  void run_deferred();

  int epoll_ = -1;
  int wake_ = -1;                        // an eventfd
  std::atomic<Task*> posted_ = nullptr;  // a stack, the last one first
  std::atomic<bool> sleeps_ = false;
  std::atomic<bool> stopping_ = false;
  std::atomic<std::thread::id> thread_{};
  TimePoint now_{};
  std::size_t ready_ = 1;
  std::span<epoll_event> left_;  // the events of this turn that have not been handled
  std::vector<Deferred*> deferred_;
  std::vector<Deferred*> running_;  // the deferred ones that are being run
  std::multimap<TimePoint, Timer*> timers_;
};

}  // namespace tessera::http2
