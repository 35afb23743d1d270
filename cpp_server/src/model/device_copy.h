// Copies from the host to a device beside serving.
//
// Contract: a free function; any thread. Compiled against torch alone.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>

namespace tessera {

// A copy of `from`, which is contiguous, on `device`, made in pieces of a megabyte with `rest`, if
// there is one, after each: a GPU takes copies from the host one after the other, so those of the
// batches that are answered meanwhile would otherwise wait for the whole table, 1.5 s for 10 GB.
at::Tensor copy_in_pieces(const at::Tensor& from, at::Device device,
                          const std::function<void()>& rest);

}  // namespace tessera
