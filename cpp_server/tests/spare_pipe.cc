// A pipe() that UBSan can ask with while the process has no descriptor left.
//
// Before its check of a virtual call follows an object's pointer to its functions, UBSan's runtime
// learns whether that memory may be read: it writes the memory into a pipe (IsAccessibleMemoryRange
// of compiler-rt, which GCC's runtime shares). Where pipe() fails it takes the memory for
// unreadable, reports that a sound object "does not point to an object" with "memory cannot be
// printed", and ends the process. A pair of a class and a type that was checked once is remembered,
// so only the first virtual call of its kind is reported. tests/attack takes a server's descriptors
// away, and such calls come then: without this function either the check or that test would have to
// go.
//
// The runtime's call of pipe() finds this one, as it does any function that a program defines in
// place of libc's. It raises the soft limit for the moment of the call, and so needs a hard limit
// that is higher.

#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <mutex>

namespace {

std::mutex raising;

// Room for the two ends, and for what other threads open meanwhile.
constexpr rlim_t kRoom = 16;

int pipe_above_the_limit(int* ends) {
  const std::scoped_lock lock(raising);
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return -1;
  rlimit raised = limit;
  raised.rlim_cur =
      limit.rlim_max - limit.rlim_cur > kRoom ? limit.rlim_cur + kRoom : limit.rlim_max;
  if (setrlimit(RLIMIT_NOFILE, &raised) != 0) return -1;
  const int result = pipe2(ends, 0);
  const int reason = errno;
  rlimit found{};
  prlimit(0, RLIMIT_NOFILE, &limit, &found);
  // Another process has set a limit meanwhile: that one holds.
  if (found.rlim_cur != raised.rlim_cur) setrlimit(RLIMIT_NOFILE, &found);
  errno = reason;
  return result;
}

}  // namespace

extern "C" int pipe(int* ends) noexcept {
  if (pipe2(ends, 0) == 0) return 0;
  return errno == EMFILE ? pipe_above_the_limit(ends) : -1;
}
