// Rows of ids in a hash-based map, on a GPU, which is not waited for.
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#include <torch/library.h>

#include <cstdint>
#include <optional>
#include <tuple>

#include "binding_places.h"
#include "cuda_places.h"

namespace tessera {
namespace {

using at::Tensor;

void check_gpu(const Tensor& ids, cudaError_t status) {
  TORCH_CHECK(status == cudaSuccess, "a kernel of ", ids.numel(),
              " ids was not launched: ", cudaGetErrorString(status));
}

void check_count(const Tensor& ids) {
  TORCH_CHECK(ids.numel() <= kMostPlacedIds, "ids: at most ", kMostPlacedIds,
              " are taken at once, got ", ids.numel());
}

// The parts of `room`, which has so many int64 numbers as `room_size` says.
CudaPlaceRoom parts_of(const Tensor& room, int64_t slots, bool has_let_in) {
  auto* const wide = room.mutable_data_ptr<int64_t>();
  CudaPlaceRoom found{};
  found.slot_rows = wide;
  found.claimed = wide + slots;
  auto* narrow = reinterpret_cast<int32_t*>(wide + 2 * slots);
  found.slot_ids = narrow;
  found.slot_firsts = reinterpret_cast<uint32_t*>(narrow + slots);
  found.claimers = reinterpret_cast<uint32_t*>(narrow + 2 * slots);
  found.slot_hours = narrow + 3 * slots;
  if (has_let_in) found.slot_let_in = narrow + 4 * slots;
  return found;
}

// `slots` is even.
int64_t room_size(int64_t slots, bool has_let_in) {
  return 2 * slots + (has_let_in ? 5 : 4) * slots / 2;
}

Tensor find_ids(const Tensor& identities, const Tensor& ids, const Tensor& sizes,
                const Tensor& firsts, int64_t first_row, int64_t range, bool divides,
                int64_t reserved, int64_t probes) {
  CudaPlaces job{};
  job.table = table_of(identities, ids, sizes, firsts, first_row, range, divides, reserved, probes);
  check_count(ids);
  const c10::cuda::CUDAGuard guard(ids.device());
  Tensor found = at::empty({ids.numel()}, ids.options());
  if (ids.numel() == 0) return found;
  job.given.ids = ids.const_data_ptr<int64_t>();
  job.given.count = ids.numel();
  job.rows = found.mutable_data_ptr<int64_t>();
  check_gpu(ids, launch_find(job, c10::cuda::getCurrentCUDAStream()));
  return found;
}

std::tuple<Tensor, Tensor> learn_ids(const Tensor& identities, const Tensor& ids,
                                     const Tensor& sizes, const Tensor& firsts, int64_t first_row,
                                     int64_t range, bool divides, int64_t reserved, int64_t probes,
                                     const std::optional<Tensor>& last_hours,
                                     const std::optional<Tensor>& hours, int64_t hour, int64_t now,
                                     bool oldest, const std::optional<Tensor>& let_in) {
  CudaPlaces job{};
  job.table = table_of(identities, ids, sizes, firsts, first_row, range, divides, reserved, probes);
  job.given = new_ids_of(job.table, ids, last_hours, hours, hour, now, oldest, let_in);
  check_count(ids);
  const c10::cuda::CUDAGuard guard(ids.device());
  const int64_t count = ids.numel();
  Tensor found = at::empty({count}, ids.options());
  Tensor evicted = at::empty({count}, ids.options());
  if (count == 0) return {found, evicted};
  const int64_t slots = place_slots(count);
  const Tensor room = at::empty({room_size(slots, let_in.has_value())}, ids.options());
  const Tensor slot_of = at::empty({count}, ids.options().dtype(at::kInt));
  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();
  check_gpu(ids, cudaMemsetAsync(room.mutable_data_ptr<int64_t>(), 0xFF, room.nbytes(), stream));
  job.room = parts_of(room, slots, let_in.has_value());
  job.slots = slot_of.mutable_data_ptr<int32_t>();
  job.rows = found.mutable_data_ptr<int64_t>();
  job.evicted = evicted.mutable_data_ptr<int64_t>();
  check_gpu(ids, launch_learn(job, stream));
  return {found, evicted};
}

}  // namespace
}  // namespace tessera

TORCH_LIBRARY_IMPL(tessera, CUDA, m) {
  m.impl("find_ids", tessera::find_ids);
  m.impl("learn_ids", tessera::learn_ids);
}
