// Records that lie on GPUs, in one or several copies: the whole model on each of several devices,
// or its shards on one each.
//
// What was replaced stays where it was, on the devices, and counts as what the undo records hold.
//
// Contract: see Weights. swap returns once every device has done it. Compiled against torch alone.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "model/weights.h"

namespace tessera {

class DeviceWeights final : public Weights {
 public:
  // The bytes of each record, [bytes] uint8, on every device that has them.
  using Places = std::map<std::string, std::vector<at::Tensor>>;

  explicit DeviceWeights(Places places) : places_(std::move(places)) {}

  std::optional<std::uint64_t> bytes(const std::string& record) const override;
  std::unique_ptr<StagedPatches> stage(std::vector<Patch> patches) override;

 private:
  const Places places_;
};

}  // namespace tessera
