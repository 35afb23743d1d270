// Reads a file into a tensor beside answering: in short pieces, with pauses between them.
//
// It is one call of an operator, since a server's Python would take the interpreter's lock for each
// piece and for each pause, thousands of times a gigabyte, on a thread of low priority: whoever
// waits for the lock waits for a CPU for that thread as well.
#include <ATen/ATen.h>
#include <time.h>
#include <torch/library.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <system_error>
#include <thread>

#include "pauses.h"

namespace tessera {
namespace {

using at::Tensor;
using std::chrono::nanoseconds;

nanoseconds time_of(clockid_t clock) {
  timespec time{};
  ::clock_gettime(clock, &time);
  return std::chrono::seconds(time.tv_sec) + nanoseconds(time.tv_nsec);
}

// The pauses of one call on its thread.
class Pauses {
 public:
  explicit Pauses(double share) : share_(share) { begin(); }

  void rest() {
    const nanoseconds used = time_of(CLOCK_THREAD_CPUTIME_ID) - used_;
    const nanoseconds passed = time_of(CLOCK_MONOTONIC) - last_;
    const nanoseconds pause = pause_behind(used, passed, share_);
    // Time that has passed without a CPU does not count later.
    if (pause == nanoseconds::zero() && passed < used + kMostPause) return;
    if (pause > nanoseconds::zero()) std::this_thread::sleep_for(pause);
    begin();
  }

 private:
  void begin() {
    last_ = time_of(CLOCK_MONOTONIC);
    used_ = time_of(CLOCK_THREAD_CPUTIME_ID);
  }

  const double share_;
  nanoseconds last_{};
  nanoseconds used_{};
};

void read_with_pauses(const Tensor& into, int64_t descriptor, int64_t offset, int64_t piece,
                      double share) {
  TORCH_CHECK(into.scalar_type() == at::kByte && into.dim() == 1 && into.is_contiguous(),
              "into: a contiguous uint8 vector is needed, got ", into.scalar_type(), " ",
              into.sizes());
  TORCH_CHECK(offset >= 0, "offset: ", offset, ", expected 0 or more");
  TORCH_CHECK(piece >= 1, "piece: ", piece, ", expected 1 or more");
  TORCH_CHECK(share > 0 && share <= 1, "share: ", share, ", expected more than 0 and at most 1");
  auto* const begin = static_cast<std::byte*>(into.mutable_data_ptr());
  Pauses pauses(share);
  for (int64_t done = 0; done < into.numel();) {
    const int64_t wanted = std::min(piece, into.numel() - done);
    const ssize_t count = ::pread(static_cast<int>(descriptor), begin + done,
                                  static_cast<std::size_t>(wanted), offset + done);
    if (count < 0 && errno == EINTR) continue;
    TORCH_CHECK(count >= 0, "descriptor ", descriptor,
                " cannot be read: ", std::system_category().message(errno));
    TORCH_CHECK(count > 0, "descriptor ", descriptor, " ends at ", offset + done, ", expected ",
                into.numel() - done, " bytes more");
    done += count;
    pauses.rest();
  }
}

}  // namespace
}  // namespace tessera

TORCH_LIBRARY_IMPL(tessera, CPU, m) { m.impl("read_with_pauses", tessera::read_with_pauses); }
