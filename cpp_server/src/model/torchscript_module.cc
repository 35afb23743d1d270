#include "model/torchscript_module.h"

#include <torch/csrc/jit/passes/inliner.h>
#include <torch/csrc/jit/runtime/graph_executor.h>
#include <torch/version.h>

#include <algorithm>
#include <array>
#include <stdexcept>
#include <utility>

#include "common/text.h"
#include "model/record_places.h"
#include "model/torchscript_runner.h"
#include "package/package_error.h"

namespace tessera {
namespace {

constexpr const char* kSharedMethod = "forward_shared";

// The first line: what torch appends below it is a trace for its own developers.
std::string first_line(const std::string& message) { return message.substr(0, message.find('\n')); }

bool copies_to_cpu(const torch::jit::Node& node) {
  if (node.kind() == c10::Symbol::fromQualString("aten::cpu")) return true;
  if (node.kind() != c10::aten::to) return false;
  for (const torch::jit::Value* input : node.inputs()) {
    const auto constant = torch::jit::toIValue(input);
    if (constant.has_value() && constant->isDevice() && constant->toDevice().is_cpu()) return true;
  }
  return false;
}

// The shard that the tensor called `name` belongs to (serving/FORMAT.md, "Devices and shards").
std::size_t shard_of(const std::string& name) {
  constexpr std::string_view kMark = "tessera_shard_";
  const auto at = name.find(kMark);
  return at == std::string::npos ? 0 : std::stoul(name.substr(at + kMark.size()));
}

// What the module's vocabularies hold, by their buffers' names (serving/FORMAT.md, "Vocabularies");
// nothing where it has none that can be read. Of several, as an ensemble has, the first.
// `copied`: not in the module's own memory.
VocabularyBuffers find_vocabularies(const torch::jit::Module& module, bool copied) {
  constexpr std::array<std::string_view, 3> kNames = {"vocabulary_keys_U", "vocabulary_places_U",
                                                      "vocabulary_seeds_V"};
  const auto held = std::make_shared<std::array<at::Tensor, kNames.size()>>();
  for (const auto& buffer : module.named_buffers()) {
    for (std::size_t i = 0; i < kNames.size(); ++i) {
      at::Tensor& own = (*held)[i];
      if (own.defined() || !buffer.name.ends_with(kNames[i])) continue;
      if (buffer.value.scalar_type() != at::kLong || buffer.value.dim() != 1) return {};
      own = buffer.value.cpu().contiguous();
      if (copied) own = own.clone();
    }
  }
  for (const at::Tensor& own : *held) {
    if (!own.defined()) return {};
  }
  const auto span = [&](std::size_t i) -> std::span<const std::int64_t> {
    const at::Tensor& own = (*held)[i];
    return {own.const_data_ptr<std::int64_t>(), static_cast<std::size_t>(own.numel())};
  };
  if (span(0).size() != span(1).size()) return {};
  return {span(0), span(1), span(2), held};
}

// `places` is told where the devices have the records; null: nobody asks.
torch::jit::Module load(const Opening& opening, const std::vector<at::Device>& devices,
                        DeviceTables& tables, DeviceWeights::Places* places,
                        const std::function<void()>& rest) {
  Opening::Opened opened = opening.opened();
  std::map<std::string, std::set<std::size_t>> shards;
  // A file is whole or not served, also where the module has no place for a table.
  for (const std::string& record : opening.tables()) shards.try_emplace(record);
  for (const Opening::TablePlace& place : opened.tables) {
    shards[place.record].insert(shard_of(place.name));
  }
  tables.read(shards);
  for (Opening::TablePlace& place : opened.tables) {
    place.put(tables.on(place.record, devices.at(shard_of(place.name))));
  }
  if (devices.size() == 1 && places == nullptr) move_constants(opened.module, devices.at(0));
  const RecordPlaces on_host =
      find_records(opened.module, opened.addresses, opening.record_bytes());
  DeviceWeights::Places moved = move_records(
      opened.module, on_host.places,
      [&](const std::string& name) { return devices.at(shard_of(name)); }, rest);
  if (places == nullptr) return std::move(opened.module);
  *places = std::move(moved);
  for (const auto& [record, all] : shards) {
    for (const std::size_t shard : all) {
      (*places)[record].push_back(tables.on(record, devices.at(shard)));
    }
  }
  return std::move(opened.module);
}

}  // namespace

TorchScriptModule::TorchScriptModule(const Opening& opening, const std::string& path,
                                     const InputSchema& schema, Form form)
    : TorchScriptModule(
          [&] { return opening.module(form == Form::kChanging ? &places_ : nullptr); }, path,
          schema, /*on_cpu=*/true, form) {}

TorchScriptModule::TorchScriptModule(const Opening& opening, const std::string& path,
                                     const InputSchema& schema,
                                     const std::vector<at::Device>& devices, DeviceTables& tables,
                                     Form form, const std::function<void()>& rest)
    : TorchScriptModule(
          [&] {
            return load(opening, devices, tables,
                        form == Form::kChanging ? &device_places_ : nullptr, rest);
          },
          path, schema, devices.at(0).is_cpu(), form) {}

TorchScriptModule::TorchScriptModule(const Load& load, const std::string& path,
                                     const InputSchema& schema, bool on_cpu, Form form)
    : schema_(schema) {
  // No fusion: recompiling at each new shape costs a server far more than fused kernels give.
  torch::jit::FusionStrategy no_fusion = {{torch::jit::FusionBehavior::STATIC, 0}};
  torch::jit::setFusionStrategy(no_fusion);
  try {
    torch::jit::Module loaded = load();
    // Tables, and nothing else in a package, are kept as bytes.
    for (const at::Tensor& tensor : loaded.buffers()) {
      if (tensor.scalar_type() != at::kByte) continue;
      table_bytes_[tensor.is_cuda() ? tensor.device().index() : -1] += tensor.nbytes();
    }
    vocabularies_ = find_vocabularies(loaded, form == Form::kChanging);
    loaded.eval();
    std::vector<std::string> more;
    if (on_cpu && loaded.find_method(kSharedMethod).has_value()) more.emplace_back(kSharedMethod);
    if (form == Form::kChanging) {
      module_ = loaded;
      torch::jit::Inline(*module_.get_method("forward").graph());  // as freezing does
    } else {
      module_ = torch::jit::freeze(loaded, more);
      // What it does beyond freezing is for the CPU.
      if (on_cpu) module_ = torch::jit::optimize_for_inference(module_, more);
    }
    forward_ = &module_.get_method("forward").function();
    if (!more.empty()) shared_ = &module_.get_method(kSharedMethod).function();
  } catch (const c10::Error& error) {
    throw PackageError(path, text("torch cannot open it: ", error.what_without_backtrace()));
  } catch (const PackageError&) {
    throw;
  } catch (const std::exception& error) {
    throw PackageError(path, text("torch cannot open it: ", first_line(error.what())));
  }
}

bool TorchScriptModule::keep_on_device() {
  const std::shared_ptr<torch::jit::Graph> graph = module_.get_method("forward").graph();
  for (torch::jit::Node* node : graph->nodes()) {
    if (node->kind() != c10::prim::DictConstruct) continue;
    for (std::size_t i = 1; i < node->inputs().size(); i += 2) {
      const torch::jit::Node* const copy = node->input(i)->node();
      if (!copies_to_cpu(*copy)) return false;
      node->replaceInput(i, copy->input(0));
    }
    on_device_ = true;
  }
  return on_device_;
}

std::vector<at::Tensor> TorchScriptModule::call(const ForwardArguments& arguments) const {
  return run(*forward_, arguments);
}

std::vector<at::Tensor> TorchScriptModule::call_shared(const ForwardArguments& arguments,
                                                       const SharedArguments& sharing) const {
  std::array<at::Tensor, std::tuple_size_v<ForwardArguments> + 2> all;
  std::copy(sharing.begin(), sharing.end(),
            std::copy(arguments.begin(), arguments.end(), all.begin()));
  return run(*shared_, all);
}

std::vector<at::Tensor> TorchScriptModule::run(torch::jit::Function& method,
                                               std::span<const at::Tensor> arguments) const {
  torch::jit::Stack stack;
  stack.reserve(1 + arguments.size());
  stack.emplace_back(module_._ivalue());
  for (const at::Tensor& argument : arguments) stack.emplace_back(argument);
  method.run(stack);
  const auto outputs = stack.at(0).toGenericDict();
  std::vector<at::Tensor> tensors;
  for (const OutputSpec& spec : schema_.outputs) {
    const auto found = outputs.find(spec.name);
    if (found == outputs.end() || !found->value().isTensor()) {
      throw std::runtime_error(text("the model gave no output '", spec.name, "'"));
    }
    at::Tensor tensor = found->value().toTensor();
    if (tensor.scalar_type() != at::kFloat || (!on_device_ && !tensor.device().is_cpu())) {
      throw std::runtime_error(text("output '", spec.name, "' is not float32 on the CPU"));
    }
    tensors.push_back(tensor.contiguous());
  }
  return tensors;
}

std::string torch_version() { return TORCH_VERSION; }

}  // namespace tessera
