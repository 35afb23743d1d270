#include "model/laid_rows.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/from_blob.h>

#include <cstdint>
#include <vector>

#include "model/row_numbers.h"

namespace tessera {
namespace {

using Tensors = at::TensorList;
using Numbers = at::IntArrayRef;

// The operator `tessera::overlay_<what>` of these types.
template <typename Signature>
c10::TypedOperatorHandle<Signature> overlay_operator(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

at::Tensor bytes_at(std::byte* begin, const std::vector<std::int64_t>& sizes) {
  return at::from_blob(begin, sizes, at::kByte);
}

class LaidByOperators final : public LaidRows {
 public:
  explicit LaidByOperators(std::span<const LaidPatch> patches) {
    std::vector<at::Tensor> storages;
    std::vector<at::Tensor> rows;
    std::vector<at::Tensor> values;
    std::vector<std::int64_t> offsets;
    std::vector<std::int64_t> strides;
    for (const LaidPatch& one : patches) {
      const PatchInfo& info = one.patch->info;
      storages.push_back(
          bytes_at(one.record.data(), {static_cast<std::int64_t>(one.record.size())}));
      rows.push_back(row_numbers(*one.patch));
      values.push_back(bytes_at(one.patch->bytes.data(), {static_cast<std::int64_t>(info.count),
                                                          static_cast<std::int64_t>(info.width)}));
      offsets.push_back(static_cast<std::int64_t>(info.offset));
      strides.push_back(static_cast<std::int64_t>(info.stride));
    }
    number_ = overlay_operator<std::int64_t(Tensors, Tensors, Tensors, Numbers, Numbers)>(
                  "tessera::overlay_make")
                  .call(storages, rows, values, offsets, strides);
  }
  ~LaidByOperators() override { drop_.call(number_); }
  LaidByOperators(const LaidByOperators&) = delete;
  LaidByOperators& operator=(const LaidByOperators&) = delete;

  bool keep() override { return keep_.call(number_); }
  void show() override { show_.call(number_); }
  void take_back() override { take_back_.call(number_); }
  bool write() override { return write_.call(number_); }

 private:
  using Piece = c10::TypedOperatorHandle<bool(std::int64_t)>;
  using Step = c10::TypedOperatorHandle<void(std::int64_t)>;

  const Piece keep_ = overlay_operator<bool(std::int64_t)>("tessera::overlay_keep");
  const Step show_ = overlay_operator<void(std::int64_t)>("tessera::overlay_show");
  const Step take_back_ = overlay_operator<void(std::int64_t)>("tessera::overlay_take_back");
  const Piece write_ = overlay_operator<bool(std::int64_t)>("tessera::overlay_write");
  const Step drop_ = overlay_operator<void(std::int64_t)>("tessera::overlay_drop");
  std::int64_t number_ = 0;
};

}  // namespace

LayRows lay_rows_by_operators() {
  if (!c10::Dispatcher::singleton().findSchema({"tessera::overlay_make", ""}).has_value()) {
    return nullptr;
  }
  return [](std::span<const LaidPatch> patches) -> std::unique_ptr<LaidRows> {
    return std::make_unique<LaidByOperators>(patches);
  };
}

}  // namespace tessera
