// The arguments of place_ids: both devices check and take them alike.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>
#include <optional>

#include "id_places.h"

namespace tessera {

inline void check_place_vector(const at::Tensor& tensor, const char* name, at::ScalarType type,
                               int64_t size, at::Device device) {
  TORCH_CHECK(tensor.scalar_type() == type && tensor.numel() == size && tensor.is_contiguous() &&
                  tensor.device() == device,
              name, ": ", size, " contiguous values of ", type, " are needed on ", device, ", got ",
              tensor.sizes(), " ", tensor.scalar_type(), " on ", tensor.device());
}

inline void check_places(const at::Tensor& identities, const at::Tensor& ids,
                         const at::Tensor& sizes, const at::Tensor& firsts, int64_t reserved,
                         int64_t probes, const std::optional<at::Tensor>& last_hours,
                         const std::optional<at::Tensor>& hours) {
  const at::Device device = identities.device();
  const int64_t rows = identities.numel();
  const int64_t count = ids.numel();
  check_place_vector(identities, "identities", at::kLong, rows, device);
  check_place_vector(ids, "ids", at::kLong, count, device);
  check_place_vector(sizes, "sizes", at::kLong, count, device);
  check_place_vector(firsts, "firsts", at::kLong, count, device);
  TORCH_CHECK(probes >= 1, "probes: at least 1 is needed, got ", probes);
  TORCH_CHECK(reserved >= 0, "reserved: at least 0 is needed, got ", reserved);
  TORCH_CHECK(last_hours.has_value() == hours.has_value(),
              "last_hours and hours: both or neither are needed");
  if (!hours.has_value()) return;
  check_place_vector(*last_hours, "last_hours", at::kInt, rows, device);
  check_place_vector(*hours, "hours", at::kInt, count, device);
}

inline IdTable table_of(const at::Tensor& identities, int64_t reserved, int64_t probes,
                        const std::optional<at::Tensor>& last_hours, int64_t now, bool oldest) {
  IdTable table{};
  table.identities = identities.mutable_data_ptr<int64_t>();
  if (last_hours.has_value()) table.last_hours = last_hours->mutable_data_ptr<int32_t>();
  table.rows = identities.numel();
  table.reserved = reserved;
  table.probes = probes;
  table.now = now;
  table.oldest = oldest;
  return table;
}

}  // namespace tessera
