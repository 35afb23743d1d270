// Reading a file's bytes into memory beside serving: in pieces with pauses, while CPUs have nothing
// else to do. One call of an operator, as a thread of Python that stands back for others and takes
// the interpreter's lock between pieces may be without a CPU while it has it.
#include <ATen/ATen.h>
#include <torch/library.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <stop_token>

#include "idle_thread.h"
#include "pauses.h"

namespace tessera {
namespace {

// The kernel copies them at once: whoever waits for the CPU waits for no longer than that.
constexpr int64_t kPieceBytes = 64 << 10;

void read_aside(const at::Tensor& out, int64_t descriptor, int64_t offset, double share) {
  TORCH_CHECK(out.scalar_type() == at::kByte && out.dim() == 1 && out.is_contiguous(),
              "out: a contiguous uint8 vector is needed, got ", out.scalar_type(), " ",
              out.sizes());
  TORCH_CHECK(offset >= 0, "offset: ", offset, ", expected 0 or more");
  TORCH_CHECK(share > 0 && share <= 1, "share: ", share, ", expected more than 0 and at most 1");
  auto* const begin = static_cast<std::byte*>(out.mutable_data_ptr());
  const int64_t bytes = out.numel();
  int64_t done = 0;
  Pauses pauses(share);
  run_when_idle([&](const std::stop_token& stop) {
    while (done < bytes && !stop.stop_requested()) {
      const auto piece = static_cast<std::size_t>(std::min(kPieceBytes, bytes - done));
      const ssize_t got = ::pread(static_cast<int>(descriptor), begin + done, piece, offset + done);
      if (got < 0 && errno == EINTR) continue;
      TORCH_CHECK(got >= 0, "the file cannot be read: ", std::strerror(errno));
      TORCH_CHECK(got > 0, "the file ends ", bytes - done, " bytes too early");
      done += got;
      pauses.rest();
    }
  });
}

}  // namespace
}  // namespace tessera

TORCH_LIBRARY_IMPL(tessera, CPU, m) { m.impl("read_aside", tessera::read_aside); }
