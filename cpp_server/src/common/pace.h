// Work that goes on beside answering: in short pieces, which take no more than a share of one CPU.
//
// Why a priority alone does not do: on Linux a thread of the lowest priority that has a CPU often
// keeps it until the scheduler's next tick, 1 to 10 ms, also where a thread that answers calls has
// become ready meanwhile and has used more than its share before; on a server that is busy half of
// the time this happens whenever a CPU is idle for a moment. So the work must end by itself.
// A slice of its own (sched_setattr(2)) does not do either: with the shortest one, 0.1 ms, and with
// the longest one, 100 ms, the p99 of calls was higher in each of three rounds than without.
//
// A pause ends while nothing is being answered, if that comes within a millisecond: two CPUs may be
// one core's, and a piece that runs beside a call makes that call slower.
//
// Contract: one thread at a time; rest alone blocks.
#pragma once

#include <time.h>

#include <functional>
#include <thread>

#include "common/clock.h"

namespace tessera {

class Pace {
 public:
  // Stops the work, calls `sleep` and lets the work go on.
  using Pause = std::function<void(const std::function<void()>& sleep)>;

  // `answering` says whether a call is being answered now; null: always. `cpu` is the clock of what
  // the work uses of CPUs, that of the thread that calls or that of another process. The work may
  // use `share` of aside_share, or of idle_share while the thread that calls is of that class.
  explicit Pace(std::function<bool()> answering = nullptr, clockid_t cpu = CLOCK_THREAD_CPUTIME_ID,
                double share = 1);

  // To be called between pieces of some 100 microseconds: sleeps until the work has used its share
  // of the time since the last call, and for a moment in any case where the work has waited for a
  // CPU (csrc/pauses.h), or not at all where no call was answered for a second.
  void rest();

  // The same, where `pause` stops the work.
  void rest(const Pause& pause);

  // What the thread that called last may use, as a share of one CPU.
  double share() const { return share_; }

 private:
  void begin();
  bool anybody(TimePoint now);
  void sleep(Duration length) const;

  const std::function<bool()> answering_;
  const double part_;  // of the share
  const int cpus_;
  const clockid_t cpu_;
  double share_ = 0;
  TimePoint seen_;  // when a call was being answered last
  std::thread::id thread_;
  TimePoint last_;
  Duration used_{};  // what the work had used then
};

// What such work may use of one CPU while calls are answered, where a process may use `cpus`: a
// tenth of them all, and one at most.
double aside_share(int cpus);

// What it may use where it runs only while CPUs have nothing else to do (csrc/idle_thread.h): a
// quarter of them all, and one at most. It delays others by the caches and the memory alone.
double idle_share(int cpus);

}  // namespace tessera
