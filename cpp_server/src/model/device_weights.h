// Records that lie on GPUs, in one or several copies: the whole model on each of several devices,
// or its shards on one each.
//
// What was replaced stays where it was, on the devices, and counts as what the undo records hold.
// While a commit is staged the rows that it replaces are copied on the device, so that batches wait
// for no more than the writing of the new ones.
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
  using Weights::stage;
  bool on_host() const override { return false; }
  std::unique_ptr<StagedPatches> stage(std::vector<Patch> patches, Beside beside,
                                       const std::function<void()>& between) override;

 private:
  const Places places_;
};

}  // namespace tessera
