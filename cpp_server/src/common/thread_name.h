// Names of threads, as `top -H`, `perf` and /proc/PID/task/*/comm show them. docs/operations.md
// lists them.
//
// Contract: each function names the thread that calls it, which every thread does before anything
// else. The threads that it starts have its name until they take their own: so torch's threads have
// the name of the worker that computes with them.
#pragma once

#include <pthread.h>

#include <array>
#include <cstddef>
#include <cstdio>

namespace tessera {

inline constexpr std::size_t kMostThreadName = 15;  // Linux keeps no more characters

template <std::size_t N>
void name_thread(const char (&name)[N]) {
  static_assert(N <= kMostThreadName + 1);
  // It fails where a sandbox forbids it, which costs the name alone.
  static_cast<void>(::pthread_setname_np(::pthread_self(), name));
}

// "worker-3", one of several threads that do the same.
template <std::size_t N>
void name_thread(const char (&name)[N], std::size_t number) {
  static_assert(N + 4 <= kMostThreadName + 1,
                "the number takes a hyphen and three digits at least");
  std::array<char, kMostThreadName + 1> made{};
  const int written = std::snprintf(made.data(), made.size(), "%s-%zu", name, number);
  if (written > 0) static_cast<void>(::pthread_setname_np(::pthread_self(), made.data()));
}

}  // namespace tessera
