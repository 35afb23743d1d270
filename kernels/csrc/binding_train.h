// The arguments of what training under bfloat16 computes, which both devices check alike.
#pragma once

#include <ATen/ATen.h>

namespace tessera {

constexpr int64_t kMostInteractionColumns = 4096;

inline void check_bf16_rows(const at::Tensor& tensor, const char* name, int64_t rows,
                            int64_t columns, const at::Device& device) {
  TORCH_CHECK(tensor.scalar_type() == at::kBFloat16 && tensor.dim() == 2 &&
                  tensor.size(0) == rows && tensor.size(1) == columns && tensor.is_contiguous() &&
                  tensor.device() == device,
              name, ": contiguous bfloat16 [", rows, ", ", columns, "] is needed on ", device,
              ", got ", tensor.scalar_type(), " ", tensor.sizes(), " on ", tensor.device());
  TORCH_CHECK(reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16 == 0, name,
              ": it must start on a multiple of 16 bytes");
}

// How many vectors `sparse` holds for each row of `dense`.
inline int64_t check_interaction_bf16(const at::Tensor& dense, const at::Tensor& sparse) {
  constexpr int64_t kMostVectors = 31;
  TORCH_CHECK(dense.dim() == 2 && dense.size(1) >= 8 && dense.size(1) % 8 == 0 &&
                  dense.size(1) <= kMostInteractionColumns,
              "dense: a matrix of 8 to ", kMostInteractionColumns,
              " columns, a multiple of 8, is needed, got ", dense.sizes());
  const int64_t dim = dense.size(1);
  const int64_t count = sparse.dim() == 2 ? sparse.size(1) / dim : 0;
  TORCH_CHECK(count >= 1 && count <= kMostVectors, "sparse: 1 to ", kMostVectors, " vectors of ",
              dim, " columns are needed, got ", sparse.sizes());
  check_bf16_rows(dense, "dense", dense.size(0), dim, dense.device());
  check_bf16_rows(sparse, "sparse", dense.size(0), count * dim, dense.device());
  return count;
}

inline int64_t interaction_columns(int64_t dim, int64_t count) {
  return dim + count * (count + 1) / 2;
}

inline void check_relu_backward(const at::Tensor& grad, const at::Tensor& output) {
  TORCH_CHECK(output.dim() == 2 && output.size(1) >= 8 && output.size(1) % 8 == 0,
              "output: a matrix whose columns are a multiple of 8 is needed, got ", output.sizes());
  check_bf16_rows(output, "output", output.size(0), output.size(1), output.device());
  check_bf16_rows(grad, "grad", output.size(0), output.size(1), output.device());
}

}  // namespace tessera
