#include "model/device_weights.h"

#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/index_select.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/InferenceMode.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <utility>

#include "request/packed.h"

namespace tessera {
namespace {

// One patch of one copy of its record.
struct Piece {
  at::Tensor rows;    // [count] int64, on the record's device
  at::Tensor stored;  // [rows of the record, width], a view of it
  at::Tensor staged;  // [count, width]
};

void wait_for(const at::Device& device) {
  if (device.is_cuda()) at::detail::getCUDAHooks().deviceSynchronize(device.index());
}

class StagedOnDevices final : public StagedPatches {
 public:
  explicit StagedOnDevices(std::vector<Piece> pieces) : pieces_(std::move(pieces)) {}

  void swap() override {
    const c10::InferenceMode inference;
    // All the memory that it takes comes first: where there is none, nothing has changed.
    std::vector<at::Tensor> replaced;
    replaced.reserve(pieces_.size());
    for (const Piece& piece : pieces_) {
      replaced.push_back(at::empty(piece.staged.sizes(), piece.staged.options()));
    }
    for (std::size_t i = 0; i < pieces_.size(); ++i) {
      Piece& piece = pieces_[i];
      const c10::OptionalDeviceGuard guard(piece.stored.device());
      at::index_select_out(replaced[i], piece.stored, 0, piece.rows);
      piece.stored.index_copy_(0, piece.rows, piece.staged);
      piece.staged = std::move(replaced[i]);
    }
    std::set<c10::DeviceIndex> waited;
    for (const Piece& piece : pieces_) {
      if (waited.insert(piece.stored.device().index()).second) wait_for(piece.stored.device());
    }
    std::reverse(pieces_.begin(), pieces_.end());  // where two overlap the last is undone first
  }

  std::uint64_t bytes() const override {
    std::uint64_t held = 0;
    for (const Piece& piece : pieces_) held += piece.rows.nbytes() + piece.staged.nbytes();
    return held;
  }

 private:
  std::vector<Piece> pieces_;
};

// The patch's rows, [count] int64, on the host.
at::Tensor rows_of(const Patch& patch) {
  const auto count = static_cast<std::int64_t>(patch.info.count);
  if (patch.rows.empty()) return at::arange(count, at::kLong);
  at::Tensor rows = at::empty({count}, at::kLong);
  auto* const out = rows.mutable_data_ptr<std::int64_t>();
  for (std::int64_t i = 0; i < count; ++i) {
    out[i] = load<std::uint32_t>(patch.rows.data(), static_cast<std::size_t>(i));
  }
  return rows;
}

}  // namespace

std::optional<std::uint64_t> DeviceWeights::bytes(const std::string& record) const {
  const auto found = places_.find(record);
  if (found == places_.end()) return std::nullopt;
  return found->second.front().nbytes();
}

std::unique_ptr<StagedPatches> DeviceWeights::stage(std::vector<Patch> patches) {
  const c10::InferenceMode inference;
  std::vector<Piece> pieces;
  for (const Patch& patch : patches) {
    const at::Tensor rows = rows_of(patch);
    const std::int64_t last = rows[-1].item<std::int64_t>();
    const auto width = static_cast<std::int64_t>(patch.info.width);
    at::Tensor bytes = at::empty({rows.size(0), width}, at::kByte);
    std::memcpy(bytes.mutable_data_ptr(), patch.bytes.data(), patch.bytes.size());
    for (const at::Tensor& record : places_.at(patch.info.record)) {
      const c10::OptionalDeviceGuard guard(record.device());
      pieces.push_back(
          {.rows = rows.to(record.device()),
           .stored = record.as_strided({last + 1, width},
                                       {static_cast<std::int64_t>(patch.info.stride), 1},
                                       static_cast<std::int64_t>(patch.info.offset)),
           .staged = bytes.to(record.device(), at::kByte, /*non_blocking=*/false, /*copy=*/true)});
    }
  }
  for (const Piece& piece : pieces) wait_for(piece.stored.device());
  return std::make_unique<StagedOnDevices>(std::move(pieces));
}

}  // namespace tessera
