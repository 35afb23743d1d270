// Rows for new ids of a hash-based map, on a GPU.
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <limits>
#include <optional>
#include <tuple>

#include "binding_places.h"
#include "cuda_places.h"

namespace tessera {
namespace {

using at::Tensor;

// The device is waited for where ids may expire, for how many rows were another id's.
std::tuple<Tensor, Tensor> place_ids(const Tensor& identities, const Tensor& ids,
                                     const Tensor& sizes, const Tensor& firsts, int64_t reserved,
                                     int64_t probes, const std::optional<Tensor>& last_hours,
                                     const std::optional<Tensor>& hours, int64_t now, bool oldest) {
  check_places(identities, ids, sizes, firsts, reserved, probes, last_hours, hours);
  const int64_t count = ids.numel();
  TORCH_CHECK(count <= kMostPlacedIds, "ids: at most ", kMostPlacedIds, " are placed at once, got ",
              count);
  const c10::cuda::CUDAGuard guard(ids.device());
  const Tensor found = at::empty({count}, ids.options());
  if (count == 0) return {found, at::empty({0}, ids.options())};
  const auto narrow = ids.options().dtype(at::kInt);
  const int64_t slots = place_slots(count);
  const Tensor slot_ids = at::full({slots}, -1, narrow);
  const Tensor slot_firsts = at::full({slots}, kUnclaimed, narrow);
  const Tensor slot_hours = at::full({slots}, std::numeric_limits<int32_t>::min(), narrow);
  const Tensor slot_rows = at::empty({slots}, ids.options());
  const Tensor claims = at::full({identities.numel()}, kUnclaimed, narrow);
  const Tensor slot_of = at::empty({count}, narrow);
  const Tensor evicted = at::empty({count}, ids.options());
  CudaPlaces job{};
  job.table = table_of(identities, reserved, probes, last_hours, now, oldest);
  job.ids = ids.const_data_ptr<int64_t>();
  job.sizes = sizes.const_data_ptr<int64_t>();
  job.firsts = firsts.const_data_ptr<int64_t>();
  if (hours.has_value()) job.hours = hours->const_data_ptr<int32_t>();
  job.count = count;
  job.slot_ids = slot_ids.mutable_data_ptr<int32_t>();
  job.slot_firsts = slot_firsts.mutable_data_ptr<int32_t>();
  job.slot_hours = slot_hours.mutable_data_ptr<int32_t>();
  job.slot_rows = slot_rows.mutable_data_ptr<int64_t>();
  job.claims = claims.mutable_data_ptr<int32_t>();
  job.slots = slot_of.mutable_data_ptr<int32_t>();
  job.found = found.mutable_data_ptr<int64_t>();
  job.evicted = evicted.mutable_data_ptr<int64_t>();
  const cudaError_t status = launch_places(job, c10::cuda::getCurrentCUDAStream());
  TORCH_CHECK(status == cudaSuccess,
              "a kernel that places ids was not launched: ", cudaGetErrorString(status));
  if (!hours.has_value()) return {found, at::empty({0}, ids.options())};
  return {found, evicted.masked_select(evicted.ge(0))};
}

}  // namespace
}  // namespace tessera

TORCH_LIBRARY_IMPL(tessera, CUDA, m) { m.impl("place_ids", tessera::place_ids); }
