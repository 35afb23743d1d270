// Checks of operator arguments that both devices share.  A failed check is an error of the
// caller: the message names the argument and both numbers.
#pragma once

#include <ATen/ATen.h>

#include "plan.h"

namespace tessera {

// The jagged description of a call: `lengths` [F * B], or offsets [F * B + 1].
struct Jagged {
  int64_t features;
  int64_t batch;
};

// What a lookup reads, but for how many bags each feature has.
inline void check_operands(const at::Tensor& weights, const at::Tensor& plan,
                           const at::Tensor& indices, const at::Tensor& lengths) {
  TORCH_CHECK(weights.scalar_type() == at::kByte && weights.dim() == 1 && weights.is_contiguous(),
              "weights: a contiguous uint8 vector is needed, got ", weights.scalar_type(), " ",
              weights.sizes());
  TORCH_CHECK(plan.scalar_type() == at::kLong && plan.dim() == 2 && plan.is_contiguous() &&
                  plan.size(0) >= 1 && plan.size(1) == kPlanColumns,
              "plan: a contiguous int64 [features >= 1, ", kPlanColumns, "] is needed, got ",
              plan.scalar_type(), " ", plan.sizes());
  const auto is_integer = [](const at::Tensor& t) {
    return t.scalar_type() == at::kInt || t.scalar_type() == at::kLong;
  };
  TORCH_CHECK(is_integer(indices) && indices.dim() == 1 && indices.is_contiguous(),
              "indices: a contiguous int32 or int64 vector is needed, got ", indices.scalar_type(),
              " ", indices.sizes());
  TORCH_CHECK(is_integer(lengths) && lengths.dim() == 1 && lengths.is_contiguous(),
              "lengths: a contiguous int32 or int64 vector is needed, got ", lengths.scalar_type(),
              " ", lengths.sizes());
  for (const at::Tensor* tensor : {&plan, &indices, &lengths}) {
    TORCH_CHECK(tensor->device() == weights.device(), "weights are on ", weights.device(),
                " but plan, indices or lengths on ", tensor->device());
  }
}

inline Jagged check_jagged(const at::Tensor& weights, const at::Tensor& plan,
                           const at::Tensor& indices, const at::Tensor& lengths, bool offsets) {
  check_operands(weights, plan, indices, lengths);
  const int64_t bags = lengths.numel() - (offsets ? 1 : 0);
  TORCH_CHECK(bags >= 0 && bags % plan.size(0) == 0,
              offsets ? "offsets: " : "lengths: ", lengths.numel(), " entries do not fit ",
              plan.size(0), " features");
  return {plan.size(0), bags / plan.size(0)};
}

inline void check_id_weights(const c10::optional<at::Tensor>& id_weights,
                             const at::Tensor& indices) {
  if (!id_weights.has_value()) return;
  TORCH_CHECK(id_weights->scalar_type() == at::kFloat && id_weights->is_contiguous() &&
                  id_weights->numel() == indices.numel() &&
                  id_weights->device() == indices.device(),
              "id_weights: ", indices.numel(), " contiguous float32 values are needed on ",
              indices.device(), ", got ", id_weights->sizes(), " ", id_weights->scalar_type(),
              " on ", id_weights->device());
}

// `sample_rows` names a bag of each feature for every row of `out`.  What the values are is the
// device's affair.
inline void check_sample_rows(const at::Tensor& sample_rows, const at::Tensor& out, int64_t bags) {
  TORCH_CHECK(
      out.dim() == 2 &&
          (sample_rows.scalar_type() == at::kInt || sample_rows.scalar_type() == at::kLong) &&
          sample_rows.dim() == 1 && sample_rows.is_contiguous() &&
          sample_rows.numel() == out.size(0) && sample_rows.device() == out.device(),
      "sample_rows: a contiguous int32 or int64 vector with an entry per row of out is "
      "needed on ",
      out.device(), ", got ", sample_rows.scalar_type(), " ", sample_rows.sizes(), " for out ",
      out.sizes());
  TORCH_CHECK(bags > 0 || out.size(0) == 0, "sample_rows: ", out.size(0),
              " samples cannot share the bags of nobody; lengths are empty");
}

inline void check_outside(const c10::optional<at::Tensor>& outside, const at::Tensor& plan) {
  if (!outside.has_value()) return;
  TORCH_CHECK(outside->scalar_type() == at::kLong && outside->is_contiguous() &&
                  outside->numel() == plan.size(0) && outside->device() == plan.device(),
              "outside: contiguous int64 [", plan.size(0), "] is needed on ", plan.device(),
              ", got ", outside->sizes(), " ", outside->scalar_type());
}

inline at::ScalarType out_scalar_type(c10::optional<at::ScalarType> dtype) {
  const at::ScalarType type = dtype.value_or(at::kFloat);
  TORCH_CHECK(type == at::kFloat || type == at::kHalf || type == at::kBFloat16,
              "dtype: float32, float16 or bfloat16 is needed, got ", type);
  return type;
}

// The same where e4m3 may be asked for as well; `scale` is for that alone.
inline at::ScalarType scaled_scalar_type(c10::optional<at::ScalarType> dtype, double scale) {
  if (dtype == at::kFloat8_e4m3fn) return at::kFloat8_e4m3fn;
  TORCH_CHECK(scale == 1.0, "scale: only float8_e4m3fn has one other than 1, got ", scale, " for ",
              dtype.value_or(at::kFloat));
  return out_scalar_type(dtype);
}

inline OutType out_type_of(at::ScalarType type) {
  if (type == at::kFloat) return OutType::kFloat32;
  if (type == at::kFloat8_e4m3fn) return OutType::kFloat8;
  return type == at::kHalf ? OutType::kFloat16 : OutType::kBFloat16;
}

inline void check_dense(const c10::optional<at::Tensor>& dense, const at::Tensor& out) {
  if (!dense.has_value()) return;
  TORCH_CHECK(dense->dim() == 2 && dense->size(0) == out.size(0) && dense->size(1) <= out.size(1) &&
                  dense->scalar_type() == out.scalar_type() && dense->device() == out.device(),
              "dense: [", out.size(0), ", at most ", out.size(1), "] ", out.scalar_type(),
              " is needed on ", out.device(), ", got ", dense->sizes(), " ", dense->scalar_type());
}

inline void check_out(const at::Tensor& out, const at::Tensor& weights, int64_t batch) {
  out_scalar_type(out.scalar_type());
  TORCH_CHECK(out.dim() == 2 && out.size(0) == batch && out.is_contiguous() &&
                  out.device() == weights.device(),
              "out: contiguous [", batch, ", width] is needed on ", weights.device(), ", got ",
              out.sizes());
}

// A float32 matrix whose rows are contiguous.
inline void check_matrix(const at::Tensor& tensor, const char* name) {
  TORCH_CHECK(tensor.scalar_type() == at::kFloat && tensor.dim() == 2 &&
                  (tensor.stride(1) == 1 || tensor.size(1) <= 1),
              name, ": a float32 matrix with contiguous rows is needed, got ", tensor.scalar_type(),
              " ", tensor.sizes());
}

// How many vectors `sparse` holds for each row of `dense`.
inline int64_t check_interaction(const at::Tensor& dense, const at::Tensor& sparse) {
  check_matrix(dense, "dense");
  check_matrix(sparse, "sparse");
  const int64_t dim = dense.size(1);
  TORCH_CHECK(dim >= 1 && sparse.size(0) == dense.size(0) && sparse.size(1) % dim == 0 &&
                  sparse.device() == dense.device(),
              "sparse: [", dense.size(0), ", a multiple of ", dim, "] is needed on ",
              dense.device(), ", got ", sparse.sizes(), " on ", sparse.device());
  return sparse.size(1) / dim;
}

}  // namespace tessera
