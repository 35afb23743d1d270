#include <ATen/Parallel.h>
#include <c10/core/InferenceMode.h>

#include <utility>

#include "batching/buffer.h"
#include "model/batch_layout.h"
#include "model/laid_rows.h"
#include "model/tensor_views.h"
#include "model/torchscript_module.h"
#include "model/torchscript_runner.h"

namespace tessera {
namespace {

class CpuScores final : public Scores {
 public:
  explicit CpuScores(std::vector<at::Tensor> outputs) : outputs_(std::move(outputs)) {}

  std::span<const float> output(std::size_t index) const override {
    const at::Tensor& tensor = outputs_.at(index);
    return {tensor.const_data_ptr<float>(), static_cast<std::size_t>(tensor.numel())};
  }

 private:
  std::vector<at::Tensor> outputs_;
};

class CpuSession final : public Session {
 public:
  CpuSession(const TorchScriptModule& module, const InputSchema& schema)
      : module_(module), schema_(schema) {}

  void begin_thread(int compute_threads) override {
    // Only the thread itself can set this: a pool that OpenMP starts on its behalf would spin
    // between batches and take the CPU from everybody else.
    at::set_num_threads(compute_threads);
  }

  HostBatch reserve(const BatchShape& shape) override {
    // Always int64, so that the graph's executor sees one type only.
    const BatchLayout layout(schema_, shape, /*padding=*/0, /*narrow=*/false);
    std::byte* const memory = memory_.take(layout.bytes() + BatchLayout::kAlignment).data();
    const auto behind = reinterpret_cast<std::uintptr_t>(memory) % BatchLayout::kAlignment;
    return layout.over(memory + (BatchLayout::kAlignment - behind), shape);
  }

  std::unique_ptr<Scores> forward(const HostBatch& batch) override {
    const c10::InferenceMode guard;
    const ForwardArguments arguments = arguments_over(batch, at::kCPU);
    return std::make_unique<CpuScores>(batch.row_index.empty()
                                           ? module_.call(arguments)
                                           : module_.call_shared(arguments, sharing_over(batch)));
  }

  std::size_t bytes() const override { return memory_.bytes(); }

 private:
  const TorchScriptModule& module_;
  const InputSchema& schema_;
  Buffer<std::byte> memory_;
};

class CpuRunner final : public Runner {
 public:
  CpuRunner(const Opening& opening, const std::string& path, const Manifest& manifest,
            bool changing)
      : schema_(manifest.schema),
        table_bytes_(manifest.table_bytes),
        module_(opening, path, schema_,
                changing ? TorchScriptModule::Form::kChanging : TorchScriptModule::Form::kFrozen) {
    if (!changing) return;
    // Else others than our lookups read rows, too (the rows of a table that is cut are gathered),
    // and know of none that lie elsewhere.
    const bool ours = manifest.num_shards == 1 &&
                      manifest.operator_libraries == std::vector<std::string>{"tessera_ops"};
    weights_ =
        std::make_unique<HostWeights>(module_.places(), ours ? lay_rows_by_operators() : LayRows());
  }

  std::vector<std::string> devices() const override { return {"cpu"}; }

  bool shares_rows() const override { return module_.has_shared(); }

  VocabularyBuffers vocabularies() const override { return module_.vocabularies(); }

  std::unique_ptr<Session> open_session(std::size_t /*device*/) override {
    return std::make_unique<CpuSession>(module_, schema_);
  }

  Weights* weights() const override { return weights_.get(); }

  std::vector<DeviceMemory> memory() const override {
    return {{.device = "cpu", .kind = "tables", .bytes = table_bytes_}};
  }

 private:
  const InputSchema schema_;
  const std::uint64_t table_bytes_;
  const TorchScriptModule module_;
  std::unique_ptr<HostWeights> weights_;
};

}  // namespace

std::unique_ptr<Runner> open_on_cpu(const Opening& opening, const std::string& path,
                                    const Manifest& manifest, bool changing) {
  // What torch computes while it opens and optimizes a model stays in this thread: a pool of its
  // own would run at the priority of none of ours.
  at::set_num_threads(1);
  return std::make_unique<CpuRunner>(opening, path, manifest, changing);
}

}  // namespace tessera
