#include "server/signals.h"

#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <system_error>

namespace tessera {
namespace {

// How long a repeat of the first signal is the same signal.
constexpr Duration kSameSignal = std::chrono::seconds(1);

sigset_t handled_signals() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGTERM);
  sigaddset(&set, SIGINT);
  sigaddset(&set, SIGHUP);
  return set;
}

}  // namespace

void block_signals() {
  const sigset_t set = handled_signals();
  pthread_sigmask(SIG_BLOCK, &set, nullptr);
  std::signal(SIGPIPE, SIG_IGN);
  // A write above the limit of a file's size (ulimit -f) fails, and ends no server.
  std::signal(SIGXFSZ, SIG_IGN);
}

SignalMeaning SignalReader::read(int number, TimePoint now) {
  if (number == SIGHUP) return SignalMeaning::kReload;
  if (!first_stop_.has_value()) {
    first_stop_ = now;
    return SignalMeaning::kDrain;
  }
  return now - *first_stop_ < kSameSignal ? SignalMeaning::kRepeat : SignalMeaning::kEnd;
}

SignalWaiter::SignalWaiter() {
  const sigset_t set = handled_signals();
  signals_ = ::signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
  woken_ = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (signals_ < 0 || woken_ < 0) {
    throw std::system_error(errno, std::generic_category(), "signalfd or eventfd");
  }
}

SignalWaiter::~SignalWaiter() {
  ::close(signals_);
  ::close(woken_);
}

void SignalWaiter::wake() {
  const std::uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = ::write(woken_, &one, sizeof(one));
}

std::optional<int> SignalWaiter::wait(TimePoint until) {
  pollfd polled[] = {{signals_, POLLIN, 0}, {woken_, POLLIN, 0}};
  int timeout_ms = -1;
  if (until != kNever) {
    const auto left =
        std::chrono::ceil<std::chrono::milliseconds>(until - std::chrono::steady_clock::now());
    timeout_ms = static_cast<int>(std::clamp<std::int64_t>(left.count(), 0, 1'000'000'000));
  }
  ::poll(polled, 2, timeout_ms);
  std::uint64_t ignored = 0;
  [[maybe_unused]] const ssize_t drained = ::read(woken_, &ignored, sizeof(ignored));
  signalfd_siginfo info{};
  if (::read(signals_, &info, sizeof(info)) == sizeof(info)) {
    return static_cast<int>(info.ssi_signo);
  }
  return std::nullopt;
}

}  // namespace tessera
