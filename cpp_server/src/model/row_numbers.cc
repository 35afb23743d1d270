#include "model/row_numbers.h"

#include <ATen/ops/empty.h>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "request/packed.h"

namespace tessera {

at::Tensor row_numbers(const Patch& patch) {
  const std::size_t count = patch.info.count;
  const auto last = load<std::uint32_t>(patch.rows.data(), count - 1);  // they ascend
  const bool narrow = last <= std::uint32_t{std::numeric_limits<std::int32_t>::max()};
  at::Tensor rows = at::empty({static_cast<std::int64_t>(count)}, narrow ? at::kInt : at::kLong);
  const auto fill = [&](auto* out) {
    using Number = std::remove_pointer_t<decltype(out)>;
    for (std::size_t i = 0; i < count; ++i) {
      out[i] = static_cast<Number>(load<std::uint32_t>(patch.rows.data(), i));
    }
  };
  if (narrow) {
    fill(rows.mutable_data_ptr<std::int32_t>());
  } else {
    fill(rows.mutable_data_ptr<std::int64_t>());
  }
  return rows;
}

}  // namespace tessera
