#include "model/device_weights.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/index_select.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "model/device_copy.h"
#include "model/row_numbers.h"
#include "request/packed.h"

namespace tessera {
namespace {

// One patch of one copy of its record, in units of the widest whole numbers that its rows consist
// of: torch moves rows number by number, so bytes would take eight times as long. On the record's
// device.
struct Piece {
  at::Tensor rows;    // [count] int32 or int64; undefined: all of `stored`
  at::Tensor stored;  // [rows of the record, units], a view of it
  at::Tensor staged;  // [count, units]
  // The other ones of what is in place and `staged`, and `rows` as torch takes them: swap then
  // writes and need not read, and takes no memory. Undefined: not prepared, or settled.
  at::Tensor other;
  at::Tensor wide_rows;
};

// Waits for what this thread has launched there, and for nothing of the batches'.
void wait_for(const at::Device& device) {
  if (!device.is_cuda()) return;
  const c10::impl::VirtualGuardImpl devices(device.type());
  devices.synchronizeStream(devices.getStream(device));
}

void wait_for(const std::vector<Piece>& pieces) {
  std::set<c10::DeviceIndex> waited;
  for (const Piece& piece : pieces) {
    if (waited.insert(piece.stored.device().index()).second) wait_for(piece.stored.device());
  }
}

// Takes the memory of what `piece` replaces.
void make_room(Piece& piece) {
  const c10::OptionalDeviceGuard guard(piece.stored.device());
  piece.other = at::empty(piece.staged.sizes(), piece.staged.options());
  if (piece.rows.defined()) piece.wide_rows = piece.rows.to(at::kLong);
}

void keep(Piece& piece) {
  const c10::OptionalDeviceGuard guard(piece.stored.device());
  if (piece.rows.defined()) {
    at::index_select_out(piece.other, piece.stored, 0, piece.wide_rows);
  } else {
    piece.other.copy_(piece.stored);
  }
}

void write(Piece& piece) {
  const c10::OptionalDeviceGuard guard(piece.stored.device());
  if (piece.rows.defined()) {
    piece.stored.index_copy_(0, piece.wide_rows, piece.staged);
  } else {
    piece.stored.copy_(piece.staged);
  }
  std::swap(piece.staged, piece.other);
}

class StagedOnDevices final : public StagedPatches {
 public:
  explicit StagedOnDevices(std::vector<Piece> pieces) : pieces_(std::move(pieces)) {}

  using StagedPatches::prepare;
  void prepare(const std::function<void()>& between) override {
    const c10::InferenceMode inference;
    for (Piece& piece : pieces_) {
      make_room(piece);
      keep(piece);
      between();
    }
    wait_for(pieces_);
    prepared_ = true;
  }

  void swap() override {
    const c10::InferenceMode inference;
    if (!prepared_) {
      // All the memory that it takes comes first: where there is none, nothing has changed.
      try {
        for (Piece& piece : pieces_) make_room(piece);
      } catch (...) {
        settle();
        throw;
      }
    }
    for (Piece& piece : pieces_) {
      if (!prepared_) keep(piece);
      write(piece);
    }
    wait_for(pieces_);
    if (!prepared_) settle();
    std::reverse(pieces_.begin(), pieces_.end());  // where two overlap the last is undone first
  }

  void settle() override {
    for (Piece& piece : pieces_) {
      piece.other.reset();
      piece.wide_rows.reset();
    }
    prepared_ = false;
  }

  std::uint64_t bytes() const override {
    std::uint64_t held = 0;
    std::set<const void*> counted;  // rows, which patches may have in common
    for (const Piece& piece : pieces_) {
      held += piece.staged.nbytes();
      if (piece.other.defined()) held += piece.other.nbytes();
      for (const at::Tensor* rows : {&piece.rows, &piece.wide_rows}) {
        if (rows->defined() && counted.insert(rows->const_data_ptr()).second) {
          held += rows->nbytes();
        }
      }
    }
    return held;
  }

 private:
  std::vector<Piece> pieces_;
  bool prepared_ = false;  // each has `other`
};

// The widest type of whole numbers of which the patch's rows, and the ways between them, are
// multiples.
at::ScalarType unit_of(const PatchInfo& info) {
  for (const at::ScalarType type : {at::kLong, at::kInt, at::kShort}) {
    const std::uint64_t bytes = at::elementSize(type);
    if (info.offset % bytes == 0 && info.stride % bytes == 0 && info.width % bytes == 0) {
      return type;
    }
  }
  return at::kByte;
}

// `bytes`, [n] uint8, as numbers of `unit`; what is left behind the last of them is left out.
at::Tensor numbers(const at::Tensor& bytes, at::ScalarType unit) {
  const auto size = static_cast<std::int64_t>(at::elementSize(unit));
  return bytes.narrow(0, 0, bytes.numel() / size * size).view(unit);
}

}  // namespace

std::optional<std::uint64_t> DeviceWeights::bytes(const std::string& record) const {
  const auto found = places_.find(record);
  if (found == places_.end()) return std::nullopt;
  return found->second.front().nbytes();
}

std::unique_ptr<StagedPatches> DeviceWeights::stage(std::vector<Patch> patches, Beside /*beside*/,
                                                    const std::function<void()>& between) {
  const c10::InferenceMode inference;
  std::vector<Piece> pieces;
  // Several patches may name one record of rows, which is copied to each device once.
  std::map<std::pair<std::string, c10::DeviceIndex>, at::Tensor> known;
  for (Patch& patch : patches) {
    const PatchInfo& info = patch.info;
    const at::ScalarType unit = unit_of(info);
    const auto size = static_cast<std::int64_t>(at::elementSize(unit));
    const auto count = static_cast<std::int64_t>(info.count);
    const std::int64_t units = static_cast<std::int64_t>(info.width) / size;
    const auto last = static_cast<std::uint32_t>(
        patch.rows.empty() ? count - 1 : load<std::uint32_t>(patch.rows.data(), info.count - 1));
    const at::Tensor rows = patch.rows.empty() ? at::Tensor() : row_numbers(patch);
    const at::Tensor bytes = at::from_blob(
        patch.bytes.data(), {static_cast<std::int64_t>(patch.bytes.size())}, at::kByte);
    for (const at::Tensor& record : places_.at(info.record)) {
      const at::Device device = record.device();
      const c10::OptionalDeviceGuard guard(device);
      Piece piece;
      if (rows.defined()) {
        at::Tensor own;
        at::Tensor& shared = info.rows.empty() ? own : known[{info.rows, device.index()}];
        if (!shared.defined()) shared = copy_in_pieces(rows, device, between);
        piece.rows = shared;
      }
      piece.stored = numbers(record, unit)
                         .as_strided({std::int64_t{last} + 1, units},
                                     {static_cast<std::int64_t>(info.stride) / size, 1},
                                     static_cast<std::int64_t>(info.offset) / size);
      piece.staged = numbers(copy_in_pieces(bytes, device, between), unit).view({count, units});
      pieces.push_back(std::move(piece));
    }
  }
  return std::make_unique<StagedOnDevices>(std::move(pieces));
}

}  // namespace tessera
