// Tensors over memory of a session. Included by files that are compiled against torch alone.
//
// Contract: free functions; the tensors borrow the memory.
#pragma once

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>

#include <cstdint>
#include <span>

#include "model/runner.h"
#include "model/torchscript_module.h"

namespace tessera {

// None may be null: an empty one is a tensor of its own.
template <typename T>
at::Tensor tensor_over(std::span<T> values, at::IntArrayRef shape, at::Device device = at::kCPU) {
  const auto options = at::TensorOptions(c10::CppTypeToScalarType<T>::value).device(device);
  if (values.empty()) return at::empty(shape, options);
  return at::from_blob(values.data(), shape, options);
}

template <typename T>
at::Tensor tensor_over(std::span<T> values, at::Device device) {
  return tensor_over(values, {static_cast<std::int64_t>(values.size())}, device);
}

// The arguments of `forward` over a batch's memory, which is `device`'s.
inline ForwardArguments arguments_over(const HostBatch& batch, at::Device device) {
  const auto ids = [&](const HostGroup& group) {
    return group.narrow.empty() ? tensor_over(group.values, device)
                                : tensor_over(group.narrow, device);
  };
  return {tensor_over(batch.dense, {batch.rows, batch.dense_features}, device),
          tensor_over(batch.id_list.lengths, device),
          ids(batch.id_list),
          tensor_over(batch.id_score_list.lengths, device),
          ids(batch.id_score_list),
          tensor_over(batch.id_score_list.weights, device)};
}

// What `forward_shared` takes besides, of a batch that has it, in the host's memory.
inline SharedArguments sharing_over(const HostBatch& batch) {
  const auto features = static_cast<std::int64_t>(batch.shared.size());
  return {at::from_blob(batch.shared.data(), {features}, at::TensorOptions(at::kBool)),
          tensor_over(batch.row_index, at::kCPU)};
}

}  // namespace tessera
