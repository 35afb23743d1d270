#include "model/device_copy.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_like.h>

#include <algorithm>

namespace tessera {
namespace {

constexpr std::int64_t kPieceBytes = 1 << 20;

}  // namespace

at::Tensor copy_in_pieces(const at::Tensor& from, at::Device device,
                          const std::function<void()>& rest) {
  const at::NoGradGuard none;
  at::Tensor to = at::empty_like(from, from.options().device(device));
  const at::Tensor source = from.flatten().view(at::kByte);
  const at::Tensor target = to.flatten().view(at::kByte);
  for (std::int64_t at = 0; at < source.numel(); at += kPieceBytes) {
    const std::int64_t count = std::min(kPieceBytes, source.numel() - at);
    target.narrow(0, at, count).copy_(source.narrow(0, at, count));
    if (rest != nullptr) rest();
  }
  return to;
}

}  // namespace tessera
