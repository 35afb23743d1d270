// One worker's way of calling a model on a GPU.
//
// A batch is merged into pinned memory, goes to the device in one copy, is computed, and its scores
// come back in one copy, all on a stream of the session's own: while one session's batch
// computes, another's copies run. For batches up to a bound the whole of the computation was
// recorded beforehand as a CUDA graph, one for each power of two of rows and for either width of
// ids; a batch is padded to the next one's rows. What a graph does not fit is launched kernel by
// kernel.
//
// Contract: see Session. Compiled against torch and CUDA alone.
#pragma once

#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAStream.h>

#include <atomic>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "model/batch_layout.h"
#include "model/gpu_resources.h"
#include "model/torchscript_module.h"

namespace tessera {

class GpuSession final : public Session {
 public:
  // `module` is on the device `device` and keeps its outputs there; it and `schema` must outlive
  // the session. Records graphs for batches of up to `graph_samples` samples, or none at 0;
  // `device_bytes` counts what the session holds on the device beside torch's own.
  GpuSession(const TorchScriptModule& module, const InputSchema& schema, int device,
             std::int64_t graph_samples, std::atomic<std::uint64_t>& device_bytes);
  ~GpuSession() override;

  void begin_thread(int compute_threads) override;
  HostBatch reserve(const BatchShape& shape) override;
  std::unique_ptr<Scores> forward(const HostBatch& batch) override;
  std::size_t bytes() const override { return in_.bytes() + out_.bytes(); }

  std::string remark() const override { return remark_; }

 private:
  // A recorded computation of `rows` rows.
  struct Recorded {
    BatchLayout layout;
    std::unique_ptr<at::cuda::CUDAGraph> graph;
  };
  // Rows, and whether ids are int32.
  using Key = std::pair<std::int64_t, bool>;

  void record(std::int64_t graph_samples);
  void record_one(const BatchLayout& layout, const BatchShape& full, at::cuda::CUDAGraph& graph,
                  at::cuda::MempoolId_t pool);
  const Recorded* find(const BatchShape& shape) const;
  void compute(const HostBatch& on_device, const at::Tensor& scores);
  at::Tensor device_bytes(std::size_t bytes) const;
  std::int64_t most_ids(std::int64_t rows, Group group) const;

  const TorchScriptModule& module_;
  const InputSchema& schema_;
  const c10::Device device_;
  const c10::cuda::CUDAStream stream_;
  std::atomic<std::uint64_t>& device_bytes_;
  std::int64_t width_ = 0;  // numbers per sample over all outputs
  std::string remark_;      // why no graphs were recorded

  // Where graphs read and write: their addresses are part of the recordings.
  at::Tensor graph_in_;
  at::Tensor graph_out_;
  std::map<Key, Recorded> graphs_;
  // Where other batches are.
  at::Tensor plain_in_;
  at::Tensor plain_out_;

  PinnedMemory in_;
  PinnedMemory out_;
  StreamMark begun_, copied_in_, computed_, copied_out_;

  // These three belong to the batch that was reserved last.
  BatchShape shape_;
  std::optional<BatchLayout> layout_;
  const Recorded* recorded_ = nullptr;
};

}  // namespace tessera
