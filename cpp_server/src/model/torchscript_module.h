// A TorchScript archive opened on one device. Included by files that are compiled against torch
// alone.
//
// Contract: opening blocks while tables are read and torch opens the rest; call may be used from
// several threads at once and blocks for as long as the CPU's side of the model takes.
#pragma once

#include <torch/csrc/jit/api/module.h>

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "model/device_tables.h"
#include "model/opening.h"
#include "model/vocabularies.h"
#include "package/schema.h"

namespace tessera {

// The arguments of the package's `forward`, in its order.
using ForwardArguments = std::array<at::Tensor, 6>;

// What the package's `forward_shared` takes behind them: which id_list features are shared, and the
// row of each sample.
using SharedArguments = std::array<at::Tensor, 2>;

class TorchScriptModule {
 public:
  // Opens what was verified, on the CPU, and freezes it, unless its weights are to change in place
  // (kChanging): a frozen graph has some of them as copies (of equal constants one, what was
  // computed of constants, transposed ones), and nobody could tell which. The operator libraries
  // must be loaded. Throws PackageError naming `path`.
  enum class Form { kFrozen, kChanging };
  TorchScriptModule(const Opening& opening, const std::string& path, const InputSchema& schema,
                    Form form = Form::kFrozen);

  // Opens what was verified but for large tables, which `tables` reads to their devices, with shard
  // k on device k of `devices` and everything else on the first; else the same. Other tensors go
  // there from the host one after the other (move_records), with `rest`, if there is one, between
  // pieces.
  TorchScriptModule(const Opening& opening, const std::string& path, const InputSchema& schema,
                    const std::vector<at::Device>& devices, DeviceTables& tables,
                    Form form = Form::kFrozen, const std::function<void()>& rest = nullptr);

  // The outputs in the schema's order, float32, on the module's device where keep_on_device has
  // been called, else on the CPU. Throws what the model throws, or std::runtime_error when the
  // outputs are not those of the schema.
  std::vector<at::Tensor> call(const ForwardArguments& arguments) const;

  // Whether the package has a `forward_shared` and is on the CPU; the same by that method.
  bool has_shared() const { return shared_ != nullptr; }
  std::vector<at::Tensor> call_shared(const ForwardArguments& arguments,
                                      const SharedArguments& sharing) const;

  // From now on the graph ends before its outputs are copied to the CPU, so that the caller can
  // copy all of them at once. False: the graph does not end in such copies and stays as it is.
  bool keep_on_device();

  // With kChanging: where it has the package's records, on the host or on its devices.
  const HostWeights::Places& places() const { return places_.places; }
  const DeviceWeights::Places& device_places() const { return device_places_; }

  // What its vocabularies hold, on the CPU; without keys where it has none. They stay what they are
  // when weights change.
  VocabularyBuffers vocabularies() const { return vocabularies_; }

  // Bytes of stored rows by device number (-1: the CPU).
  const std::map<int, std::uint64_t>& table_bytes() const { return table_bytes_; }

 private:
  // Gives the module, on its devices.
  using Load = std::function<torch::jit::Module()>;

  TorchScriptModule(const Load& load, const std::string& path, const InputSchema& schema,
                    bool on_cpu, Form form);

  std::vector<at::Tensor> run(torch::jit::Function& method,
                              std::span<const at::Tensor> arguments) const;

  RecordPlaces places_;
  DeviceWeights::Places device_places_;
  torch::jit::Module module_;
  torch::jit::Function* forward_ = nullptr;
  torch::jit::Function* shared_ = nullptr;  // null: the module has no such method
  InputSchema schema_;
  bool on_device_ = false;
  VocabularyBuffers vocabularies_;
  std::map<int, std::uint64_t> table_bytes_;
};

}  // namespace tessera
