// Work that runs only while a CPU has nothing else to do, as long as that happens often enough.
//
// A thread of the class SCHED_IDLE gives its CPU to whoever wakes up there at once, and where the
// kernel looks for a CPU for a thread that wakes up, one that runs only such threads counts as
// free. A thread of the lowest priority has neither: it keeps its CPU until a scheduler's tick, and
// those that wake up meanwhile are put behind each other on the others (docs/benchmarks.md has what
// calls wait then). But a thread of the class has a three-hundredth of a CPU that others want all
// the time, and without privileges it cannot go back to another class. So such work must be of the
// kind that another thread can go on with.
//
// Contract: Starvation: one object per thread. The functions: any thread; run_when_idle blocks.
#pragma once

#include <time.h>

#include <functional>
#include <stop_token>

#include "common/clock.h"

namespace tessera {

// How little of a CPU, and for how long, is too little.
struct Patience {
  double share = 0.01;
  Duration length = std::chrono::seconds(2);
};

// Whether work has had too little of a CPU.
class Starvation {
 public:
  // `cpu` is the clock of what the work uses of CPUs; it is there as long as this is asked.
  explicit Starvation(clockid_t cpu, Patience patience = {});

  // Whether it has used less than the share over the last of the lengths that are whole; to be
  // called now and then.
  bool seen();

 private:
  const clockid_t cpu_;
  const Patience patience_;
  TimePoint begin_;
  Duration used_;
};

// Gives the calling thread, or the process `process`, the class SCHED_IDLE; false: it is refused.
bool be_idle(pid_t process = 0);

// Calls `work` on a thread of that class and waits for it. Where it has too little of a CPU, `stop`
// is asked for, and once it has returned `work` is called again, on the calling thread and with a
// `stop` that never is, to do what is left, if anything is. So it does where the system gives no
// such thread. Throws what `work` throws.
void run_when_idle(const std::function<void(const std::stop_token& stop)>& work,
                   Patience patience = {});

}  // namespace tessera
