#include "model/torchscript_runner.h"

#include <caffe2/serialize/read_adapter_interface.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/runtime/graph_executor.h>
#include <torch/csrc/jit/serialization/import.h>
#include <torch/version.h>

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/InferenceMode.h>

#include <stdexcept>
#include <utility>
#include <vector>

#include "common/text.h"
#include "package/package_error.h"

namespace tessera {
namespace {

// torch reads the very file that was verified, not whatever is at its path by now.
class FileAdapter final : public caffe2::serialize::ReadAdapterInterface {
 public:
  explicit FileAdapter(std::shared_ptr<const PackageFile> file) : file_(std::move(file)) {}

  size_t size() const override { return file_->size(); }

  size_t read(uint64_t offset, void* buffer, size_t count, const char* /*what*/) const override {
    file_->read_at(offset, {static_cast<std::byte*>(buffer), count});
    return count;
  }

 private:
  std::shared_ptr<const PackageFile> file_;
};

class TorchScores final : public Scores {
 public:
  explicit TorchScores(std::vector<at::Tensor> outputs) : outputs_(std::move(outputs)) {}

  std::span<const float> output(std::size_t index) const override {
    const at::Tensor& tensor = outputs_.at(index);
    return {tensor.const_data_ptr<float>(), static_cast<std::size_t>(tensor.numel())};
  }

 private:
  std::vector<at::Tensor> outputs_;
};

// A tensor over memory of the caller; none may be null.
template <typename T>
at::Tensor view(std::span<T> values, at::IntArrayRef shape) {
  const auto type = c10::CppTypeToScalarType<T>::value;
  if (values.empty()) return at::empty(shape, type);
  return at::from_blob(values.data(), shape, at::TensorOptions(type));
}

template <typename T>
at::Tensor flat(std::span<T> values) {
  return view(values, {static_cast<std::int64_t>(values.size())});
}

// The first line: what torch appends below it is a trace for its own developers.
std::string first_line(const std::string& message) {
  return message.substr(0, message.find('\n'));
}

}  // namespace

struct TorchScriptRunner::Module {
  torch::jit::Module module;
  torch::jit::Function* forward = nullptr;
};

TorchScriptRunner::TorchScriptRunner(std::shared_ptr<const PackageFile> file,
                                     const InputSchema& schema)
    : module_(std::make_unique<Module>()), schema_(schema) {
  // No fusion: recompiling at each new shape costs a server far more than fused kernels give.
  torch::jit::FusionStrategy no_fusion = {{torch::jit::FusionBehavior::STATIC, 0}};
  torch::jit::setFusionStrategy(no_fusion);
  const std::string path = file->path();
  try {
    torch::jit::Module loaded = torch::jit::load(std::make_shared<FileAdapter>(file), at::kCPU);
    loaded.eval();
    torch::jit::Module frozen = torch::jit::freeze(loaded);
    module_->module = torch::jit::optimize_for_inference(frozen);
    module_->forward = &module_->module.get_method("forward").function();
  } catch (const c10::Error& error) {
    throw PackageError(path, text("torch cannot open it: ", error.what_without_backtrace()));
  } catch (const PackageError&) {
    throw;
  } catch (const std::exception& error) {
    throw PackageError(path, text("torch cannot open it: ", first_line(error.what())));
  }
}

TorchScriptRunner::~TorchScriptRunner() = default;

void TorchScriptRunner::prepare_thread(int compute_threads) {
  // Only the thread itself can set this: a pool that OpenMP starts on its behalf would spin
  // between batches and take the CPU from everybody else.
  at::set_num_threads(compute_threads);
}

std::unique_ptr<Scores> TorchScriptRunner::forward(const HostBatch& batch) {
  const c10::InferenceMode guard;
  torch::jit::Stack stack;
  stack.reserve(7);
  stack.emplace_back(module_->module._ivalue());
  stack.emplace_back(view(batch.dense, {batch.samples, batch.dense_features}));
  for (const HostGroup* group : {&batch.id_list, &batch.id_score_list}) {
    stack.emplace_back(flat(group->lengths));
    stack.emplace_back(flat(group->values));
  }
  stack.emplace_back(flat(batch.id_score_list.weights));
  module_->forward->run(stack);
  const auto outputs = stack.at(0).toGenericDict();
  std::vector<at::Tensor> tensors;
  for (const OutputSpec& spec : schema_.outputs) {
    const auto found = outputs.find(spec.name);
    if (found == outputs.end() || !found->value().isTensor()) {
      throw std::runtime_error(text("the model gave no output '", spec.name, "'"));
    }
    at::Tensor tensor = found->value().toTensor();
    if (tensor.scalar_type() != at::kFloat || !tensor.device().is_cpu()) {
      throw std::runtime_error(text("output '", spec.name, "' is not float32 on the CPU"));
    }
    tensors.push_back(tensor.contiguous());
  }
  return std::make_unique<TorchScores>(std::move(tensors));
}

std::string torch_version() { return TORCH_VERSION; }

}  // namespace tessera
