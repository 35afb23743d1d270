// The arguments of find_ids and learn_ids: both devices check and take them alike.
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

// What find_ids and learn_ids are both given.
inline IdTable table_of(const at::Tensor& identities, const at::Tensor& ids,
                        const at::Tensor& sizes, const at::Tensor& firsts, int64_t first_row,
                        int64_t range, bool divides, int64_t reserved, int64_t probes) {
  const at::Device device = identities.device();
  check_place_vector(identities, "identities", at::kLong, identities.numel(), device);
  check_place_vector(ids, "ids", at::kLong, ids.numel(), device);
  check_place_vector(sizes, "sizes", at::kLong, sizes.numel(), device);
  check_place_vector(firsts, "firsts", at::kLong, sizes.numel(), device);
  TORCH_CHECK(sizes.numel() >= 1, "sizes: those of at least 1 bucket are needed, got none");
  TORCH_CHECK(range >= 0, "range: at least 0 is needed, got ", range);
  TORCH_CHECK(probes >= 1, "probes: at least 1 is needed, got ", probes);
  TORCH_CHECK(reserved >= 0, "reserved: at least 0 is needed, got ", reserved);
  IdTable table{};
  table.identities = identities.mutable_data_ptr<int64_t>();
  table.rows = identities.numel();
  table.reserved = reserved;
  table.probes = probes;
  table.sizes = sizes.const_data_ptr<int64_t>();
  table.firsts = firsts.const_data_ptr<int64_t>();
  table.buckets = sizes.numel();
  table.first_row = first_row;
  table.range = range;
  table.divides = divides;
  return table;
}

inline NewIds new_ids_of(IdTable& table, const at::Tensor& ids,
                         const std::optional<at::Tensor>& last_hours,
                         const std::optional<at::Tensor>& hours, int64_t hour, int64_t now,
                         bool oldest, const std::optional<at::Tensor>& let_in) {
  NewIds found{};
  found.ids = ids.const_data_ptr<int64_t>();
  found.count = ids.numel();
  if (last_hours.has_value()) {
    check_place_vector(*last_hours, "last_hours", at::kInt, table.rows, ids.device());
    table.last_hours = last_hours->mutable_data_ptr<int32_t>();
    table.now = now;
    table.oldest = oldest;
  }
  if (hours.has_value()) {
    TORCH_CHECK(last_hours.has_value(), "hours: last_hours is needed as well");
    check_place_vector(*hours, "hours", at::kInt, found.count, ids.device());
    found.hours = hours->const_data_ptr<int32_t>();
  }
  TORCH_CHECK(hour >= 0 && hour <= INT32_MAX, "hour: 0 to ", INT32_MAX, " is needed, got ", hour);
  found.hour = static_cast<int32_t>(hour);
  if (let_in.has_value()) {
    check_place_vector(*let_in, "let_in", at::kBool, found.count, ids.device());
    found.let_in = let_in->const_data_ptr<bool>();
  }
  return found;
}

}  // namespace tessera
