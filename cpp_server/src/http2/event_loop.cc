#include "http2/event_loop.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <system_error>

namespace tessera::http2 {
namespace {

constexpr std::size_t kEventsPerTurn = 128;

timespec timespec_of(Duration left) {
  const auto whole = std::chrono::floor<std::chrono::seconds>(left);
  timespec made{};
  made.tv_sec = static_cast<time_t>(whole.count());
  made.tv_nsec = static_cast<long>((left - whole).count());
  return made;
}

}  // namespace

EventLoop::EventLoop()
    : epoll_(::epoll_create1(EPOLL_CLOEXEC)),
      wake_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      now_(std::chrono::steady_clock::now()) {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.ptr = nullptr;  // the wake-up has no handler
  if (epoll_ < 0 || wake_ < 0 || ::epoll_ctl(epoll_, EPOLL_CTL_ADD, wake_, &event) != 0) {
    const int reason = errno;
    ::close(epoll_);
    ::close(wake_);
    throw std::system_error(reason, std::generic_category(), "epoll or eventfd");
  }
}

EventLoop::~EventLoop() {
  ::close(epoll_);
  ::close(wake_);
}

bool EventLoop::add(int descriptor, std::uint32_t events, Handler& handler) {
  epoll_event event{};
  event.events = events;
  event.data.ptr = &handler;
  return ::epoll_ctl(epoll_, EPOLL_CTL_ADD, descriptor, &event) == 0;
}

void EventLoop::change(int descriptor, std::uint32_t events, Handler& handler) {
  epoll_event event{};
  event.events = events;
  event.data.ptr = &handler;
  ::epoll_ctl(epoll_, EPOLL_CTL_MOD, descriptor, &event);
}

void EventLoop::remove(int descriptor, Handler& handler) {
  ::epoll_ctl(epoll_, EPOLL_CTL_DEL, descriptor, nullptr);
  for (epoll_event& event : left_) {
    if (event.data.ptr == &handler) event.events = 0;
  }
}

void EventLoop::post(Task& task) {
  Task* last = posted_.load(std::memory_order_relaxed);
  do {
    task.next_ = last;
  } while (!posted_.compare_exchange_weak(last, &task));
  // The loop says that it sleeps before it looks for tasks a last time: one of the two sees the
  // other.
  if (last == nullptr) wake();
}

void EventLoop::wake() {
  if (!sleeps_.exchange(false)) return;
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(wake_, &one, sizeof(one));
}

void EventLoop::stop() {
  stopping_.store(true);
  wake();
}

void EventLoop::defer(Deferred& deferred) {
  if (deferred.deferred_) return;
  deferred.deferred_ = true;
  deferred_.push_back(&deferred);
}

void EventLoop::forget(Deferred& deferred) {
  deferred.deferred_ = false;
  std::erase(deferred_, &deferred);
  std::replace(running_.begin(), running_.end(), &deferred, static_cast<Deferred*>(nullptr));
}

void EventLoop::schedule(Timer& timer, TimePoint due) {
  cancel(timer);
  timer.due_ = due;
  timers_.emplace(due, &timer);
}

void EventLoop::cancel(Timer& timer) {
  if (timer.due_ == kNever) return;
  const auto [first, last] = timers_.equal_range(timer.due_);
  const auto found =
      std::find_if(first, last, [&](const auto& entry) { return entry.second == &timer; });
  if (found != last) timers_.erase(found);
  timer.due_ = kNever;
}

int EventLoop::wait(std::span<epoll_event> events) {
  sleeps_.store(true);
  const bool idle = posted_.load() == nullptr && !stopping_.load() && deferred_.empty();
  int found = 0;
  if (!idle) {
    found = ::epoll_wait(epoll_, events.data(), static_cast<int>(events.size()), 0);
  } else if (timers_.empty()) {
    found = ::epoll_wait(epoll_, events.data(), static_cast<int>(events.size()), -1);
  } else {
    const Duration left = timers_.begin()->first - std::chrono::steady_clock::now();
    const timespec limit = timespec_of(std::max(left, Duration::zero()));
    found = ::epoll_pwait2(epoll_, events.data(), static_cast<int>(events.size()), &limit, nullptr);
  }
  if (found < 0 && errno != EINTR) {
    throw std::system_error(errno, std::generic_category(), "epoll_wait");
  }
  sleeps_.store(false);
  return std::max(found, 0);
}

void EventLoop::run() {
  thread_.store(std::this_thread::get_id());
  std::array<epoll_event, kEventsPerTurn> events;
  while (true) {
    const bool last_turn = stopping_.load();
    const auto found = static_cast<std::size_t>(wait(events));
    now_ = std::chrono::steady_clock::now();
    ready_ = std::max<std::size_t>(found, 1);
    for (std::size_t i = 0; i < found; ++i) {
      left_ = std::span(events).subspan(i + 1, found - i - 1);
      if (events[i].events == 0) continue;
      if (events[i].data.ptr == nullptr) {
        std::uint64_t count = 0;
        [[maybe_unused]] const ssize_t drained = ::read(wake_, &count, sizeof(count));
        continue;
      }
      static_cast<Handler*>(events[i].data.ptr)->on_ready(events[i].events);
    }
    left_ = {};
    run_posted();
    run_timers();
    run_deferred();
    if (last_turn) break;
  }
  stopping_.store(false);
  thread_.store(std::thread::id());
}

void EventLoop::run_posted() {
  Task* last = posted_.exchange(nullptr);
  Task* first = nullptr;
  while (last != nullptr) {  // the stack's order is turned round
    Task* const before = last->next_;
    last->next_ = first;
    first = last;
    last = before;
  }
  while (first != nullptr) {
    Task* const next = first->next_;  // running it may destroy it
    first->run();
    first = next;
  }
}

void EventLoop::run_timers() {
  while (!timers_.empty() && timers_.begin()->first <= now_) {
    Timer& timer = *timers_.begin()->second;
    timers_.erase(timers_.begin());
    timer.due_ = kNever;
    timer.action_();
  }
}

void EventLoop::run_deferred() {
  running_.swap(deferred_);
  // By index: what is run may forget another.
  for (std::size_t i = 0; i < running_.size(); ++i) {
    Deferred* const one = running_[i];
    if (one == nullptr) continue;
    one->deferred_ = false;
    one->on_turn_end();
  }
  running_.clear();
}

}  // namespace tessera::http2
