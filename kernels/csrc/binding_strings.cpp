// Ids of strings on the CPU: check every size, then hash.
#include <ATen/ATen.h>
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <cstdint>

#include "xxh64.h"

namespace tessera {
namespace {

using at::Tensor;

// Under this many strings another thread costs more than it brings.
constexpr int64_t kStringsPerThread = 1 << 14;

// Where string number `i` ends, if every string ends where the next begins: ascending numbers from
// 0 on that stay within `size`.
template <typename T>
void check_offsets(const T* offsets, int64_t strings, int64_t size) {
  T before = 0;
  for (int64_t i = 0; i <= strings; ++i) {
    TORCH_CHECK(offsets[i] >= before && offsets[i] <= size, "offsets: entry ", i, " is ",
                offsets[i], ", expected ", before, " to ", size);
    before = offsets[i];
  }
}

Tensor xxh64_of_strings(const Tensor& bytes, const Tensor& offsets) {
  TORCH_CHECK(bytes.scalar_type() == at::kByte && bytes.dim() == 1 && bytes.is_contiguous(),
              "bytes: a contiguous uint8 vector is needed, got ", bytes.scalar_type(), " ",
              bytes.sizes());
  TORCH_CHECK((offsets.scalar_type() == at::kInt || offsets.scalar_type() == at::kLong) &&
                  offsets.dim() == 1 && offsets.is_contiguous() && offsets.numel() >= 1,
              "offsets: a contiguous int32 or int64 vector of at least one entry is needed, got ",
              offsets.scalar_type(), " ", offsets.sizes());
  const int64_t strings = offsets.numel() - 1;
  Tensor ids = at::empty({strings}, bytes.options().dtype(at::kLong));
  AT_DISPATCH_INDEX_TYPES(offsets.scalar_type(), "xxh64", [&] {
    const auto* const ends = offsets.const_data_ptr<index_t>();
    check_offsets(ends, strings, bytes.numel());
    const uint8_t* const content = bytes.const_data_ptr<uint8_t>();
    int64_t* const out = ids.mutable_data_ptr<int64_t>();
    at::parallel_for(0, strings, kStringsPerThread, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const auto size = static_cast<size_t>(ends[i + 1] - ends[i]);
        out[i] = static_cast<int64_t>(xxh64(content + ends[i], size));
      }
    });
  });
  return ids;
}

}  // namespace
}  // namespace tessera

TORCH_LIBRARY_IMPL(tessera, CPU, m) { m.impl("xxh64", tessera::xxh64_of_strings); }
