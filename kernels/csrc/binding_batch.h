// The arguments of rows_of_ids, unpack_rows, pack_rows and dense_steps, which all devices check
// alike.
#pragma once

#include <ATen/ATen.h>

#include <cstdint>

namespace tessera {

inline void check_integers(const at::Tensor& tensor, const char* name, const at::Device& device) {
  const bool is_integer = tensor.scalar_type() == at::kInt || tensor.scalar_type() == at::kLong;
  TORCH_CHECK(
      is_integer && tensor.dim() == 1 && tensor.is_contiguous() && tensor.device() == device, name,
      ": a contiguous int32 or int64 vector is needed on ", device, ", got ", tensor.scalar_type(),
      " ", tensor.sizes(), " on ", tensor.device());
}

// How many bags each feature has.
inline int64_t check_id_rows(const at::Tensor& ids, const at::Tensor& offsets,
                             const at::Tensor& rows, const at::Tensor& rules,
                             const at::Tensor& outside) {
  check_integers(ids, "ids", ids.device());
  check_integers(offsets, "offsets", ids.device());
  const int64_t features = rows.numel();
  TORCH_CHECK(features >= 1, "rows: those of at least one feature are needed, got none");
  const auto check_constants = [&](const at::Tensor& tensor, const char* name) {
    TORCH_CHECK(tensor.scalar_type() == at::kLong && tensor.numel() == features &&
                    tensor.is_contiguous() && tensor.device() == ids.device(),
                name, ": ", features, " contiguous int64 values are needed on ", ids.device(),
                ", got ", tensor.scalar_type(), " ", tensor.sizes(), " on ", tensor.device());
  };
  check_constants(rows, "rows");
  check_constants(rules, "rules");
  check_constants(outside, "outside");
  const int64_t bags = offsets.numel() - 1;
  TORCH_CHECK(bags >= 0 && bags % features == 0, "offsets: ", offsets.numel(),
              " entries do not fit ", features, " features");
  return bags / features;
}

inline void check_packed_rows(const at::Tensor& words, int64_t present, int64_t first,
                              int64_t features, int64_t count) {
  constexpr int64_t kMostFeatures = 32;  // bits of a word
  TORCH_CHECK(words.scalar_type() == at::kInt && words.dim() == 2 && words.is_contiguous(),
              "words: a contiguous int32 matrix is needed, got ", words.scalar_type(), " ",
              words.sizes());
  const int64_t width = words.size(1);
  TORCH_CHECK(features >= 1 && features <= kMostFeatures, "features: 1 to ", kMostFeatures,
              " are needed, got ", features);
  TORCH_CHECK(first >= 0 && first <= width - features, "first: the words ", first, " to ",
              first + features - 1, " are not all in rows of ", width);
  TORCH_CHECK(present >= 0 && present < width, "present: word ", present, " is not in rows of ",
              width);
  TORCH_CHECK(count >= 0 && count <= features * words.size(0), "count: 0 to ",
              features * words.size(0), " ids can be there, got ", count);
}

inline void check_dense_steps(const at::Tensor& values, const at::Tensor& steps) {
  TORCH_CHECK(values.scalar_type() == at::kFloat && values.dim() == 2,
              "values: a float32 matrix is needed, got ", values.scalar_type(), " ",
              values.sizes());
  TORCH_CHECK(steps.scalar_type() == at::kDouble && steps.dim() == 3 && steps.is_contiguous() &&
                  steps.size(1) == values.size(1) && steps.size(2) == 3 &&
                  steps.device() == values.device(),
              "steps: contiguous float64 [steps, ", values.size(1), ", 3] is needed on ",
              values.device(), ", got ", steps.scalar_type(), " ", steps.sizes(), " on ",
              steps.device());
}

}  // namespace tessera
