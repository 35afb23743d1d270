#include "model/gpu_session.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGuard.h>

#include <algorithm>
#include <stdexcept>
#include <vector>

#include "common/text.h"
#include "model/graph_rows.h"
#include "model/tensor_views.h"

namespace tessera {
namespace {

// A recorded graph has room for so many ids per bag, on average over a batch; room costs memory
// and no time, because only what is used of it is copied.
constexpr std::int64_t kIdsPerBag = 32;
// TorchScript's executor has settled after so many calls (golden.cc).
constexpr int kSettlingCalls = 3;

std::string first_line(const std::string& message) { return message.substr(0, message.find('\n')); }

// The allocator's part of a recording that failed.
void end_recording(c10::Device device, at::cuda::MempoolId_t pool) {
  try {
    c10::cuda::CUDACachingAllocator::endAllocateToPool(device.index(), pool);
  } catch (const std::exception&) {
    // It had ended already.
  }
}

class GpuScores final : public Scores {
 public:
  GpuScores(const InputSchema& schema, const float* values, const HostBatch& batch, Duration copies)
      : schema_(schema),
        values_(values),
        samples_(batch.samples),
        rows_(batch.rows),
        copies_(copies) {}

  std::span<const float> output(std::size_t index) const override {
    std::int64_t before = 0;
    for (std::size_t i = 0; i < index; ++i) before += schema_.outputs[i].width;
    return {values_ + before * rows_,
            static_cast<std::size_t>(samples_ * schema_.outputs[index].width)};
  }

  Duration transfer() const override { return copies_; }

 private:
  const InputSchema& schema_;
  const float* const values_;
  const std::int64_t samples_;
  const std::int64_t rows_;
  const Duration copies_;
};

}  // namespace

GpuSession::GpuSession(const TorchScriptModule& module, const InputSchema& schema, int device,
                       std::int64_t graph_samples, std::atomic<std::uint64_t>& device_bytes)
    : module_(module),
      schema_(schema),
      device_(c10::kCUDA, static_cast<c10::DeviceIndex>(device)),
      stream_(c10::cuda::getStreamFromPool(/*isHighPriority=*/false, device_.index())),
      device_bytes_(device_bytes) {
  for (const OutputSpec& output : schema.outputs) width_ += output.width;
  if (graph_samples == 0) return;
  const c10::cuda::CUDAStreamGuard guard(stream_);
  const c10::InferenceMode inference;
  try {
    record(graph_samples);
  } catch (const std::exception& error) {
    remark_ = "no CUDA graphs were recorded: " + first_line(error.what());
    graphs_.clear();
    cudaGetLastError();  // what the failed recording left behind
  }
}

GpuSession::~GpuSession() {
  cudaStreamSynchronize(stream_.stream());
  for (const at::Tensor* held : {&graph_in_, &graph_out_, &plain_in_, &plain_out_}) {
    if (held->defined()) device_bytes_ -= held->nbytes();
  }
}

void GpuSession::begin_thread(int compute_threads) {
  at::set_num_threads(compute_threads);
  c10::cuda::set_device(device_.index());
}

at::Tensor GpuSession::device_bytes(std::size_t bytes) const {
  device_bytes_ += bytes;
  return at::zeros({static_cast<std::int64_t>(bytes)},
                   at::TensorOptions(at::kByte).device(device_));
}

std::int64_t GpuSession::most_ids(std::int64_t rows, Group group) const {
  return rows * kIdsPerBag * static_cast<std::int64_t>(schema_.group_size(group));
}

void GpuSession::record(std::int64_t graph_samples) {
  std::vector<Key> keys;
  for (const std::int64_t rows : graph_rows(graph_samples)) {
    keys.emplace_back(rows, true);
    keys.emplace_back(rows, false);
  }
  const auto layout_of = [&](const Key& key) {
    return BatchLayout(schema_, key.first, most_ids(key.first, Group::kIdList),
                       most_ids(key.first, Group::kIdScoreList), key.second);
  };
  const std::int64_t most_rows = keys.back().first;
  graph_in_ = device_bytes(layout_of(keys.back()).bytes());
  graph_out_ = device_bytes(static_cast<std::size_t>(most_rows * width_) * sizeof(float));
  const at::cuda::MempoolId_t pool = at::cuda::graph_pool_handle();
  // The largest first: the others then find memory in its pool.
  for (auto key = keys.rbegin(); key != keys.rend(); ++key) {
    Recorded recorded{layout_of(*key), std::make_unique<at::cuda::CUDAGraph>()};
    record_one(recorded.layout,
               {.samples = key->first,
                .plain_ids = most_ids(key->first, Group::kIdList),
                .scored_ids = most_ids(key->first, Group::kIdScoreList),
                .narrow = key->second},
               *recorded.graph, pool);
    graphs_.emplace(*key, std::move(recorded));
  }
}

void GpuSession::record_one(const BatchLayout& layout, const BatchShape& full,
                            at::cuda::CUDAGraph& graph, at::cuda::MempoolId_t pool) {
  graph_in_.zero_();  // empty bags, until a batch is copied there
  const HostBatch batch = layout.over(reinterpret_cast<std::byte*>(graph_in_.data_ptr()), full);
  const at::Tensor scores = graph_out_.view(at::kFloat).narrow(0, 0, batch.rows * width_);
  for (int call = 0; call < kSettlingCalls; ++call) compute(batch, scores);
  check_cuda(cudaStreamSynchronize(stream_.stream()), "calling the model");
  // Other threads go on allocating meanwhile.
  graph.capture_begin(pool, cudaStreamCaptureModeThreadLocal);
  try {
    compute(batch, scores);
  } catch (...) {
    try {
      graph.capture_end();
    } catch (const std::exception&) {
      // It says that the recording failed, which is known; what it left out is done here.
      end_recording(device_, pool);
    }
    throw;
  }
  graph.capture_end();
}

const GpuSession::Recorded* GpuSession::find(const BatchShape& shape) const {
  const auto found = std::find_if(graphs_.begin(), graphs_.end(), [&](const auto& entry) {
    const auto& [rows, narrow] = entry.first;
    return narrow == shape.narrow && rows >= shape.samples;
  });
  if (found == graphs_.end()) return nullptr;
  const std::int64_t rows = found->first.first;
  const bool fits = shape.plain_ids <= most_ids(rows, Group::kIdList) &&
                    shape.scored_ids <= most_ids(rows, Group::kIdScoreList);
  return fits ? &found->second : nullptr;
}

HostBatch GpuSession::reserve(const BatchShape& shape) {
  shape_ = shape;
  recorded_ = find(shape);
  layout_ = recorded_ != nullptr ? recorded_->layout
                                 : BatchLayout(schema_, shape.samples, shape.plain_ids,
                                               shape.scored_ids, shape.narrow);
  return layout_->over(in_.take(layout_->used(shape)), shape);
}

void GpuSession::compute(const HostBatch& on_device, const at::Tensor& scores) {
  const std::vector<at::Tensor> outputs = module_.call(arguments_over(on_device, device_));
  std::int64_t at = 0;
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    const std::int64_t count = on_device.rows * schema_.outputs[i].width;
    if (outputs[i].numel() != count) {
      throw std::runtime_error(text("output '", schema_.outputs[i].name, "' has ",
                                    outputs[i].numel(), " numbers, the schema promises ",
                                    on_device.rows, " samples by ", schema_.outputs[i].width));
    }
    scores.narrow(0, at, count).copy_(outputs[i].flatten(), /*non_blocking=*/true);
    at += count;
  }
}

std::unique_ptr<Scores> GpuSession::forward(const HostBatch& batch) {
  const c10::cuda::CUDAStreamGuard guard(stream_);
  const c10::InferenceMode inference;
  const cudaStream_t stream = stream_.stream();
  const std::size_t in_bytes = layout_->used(shape_);
  const std::size_t out_bytes = static_cast<std::size_t>(batch.rows * width_) * sizeof(float);
  at::Tensor& in = recorded_ != nullptr ? graph_in_ : plain_in_;
  at::Tensor& out = recorded_ != nullptr ? graph_out_ : plain_out_;
  const auto room = [&](at::Tensor& held, std::size_t bytes) {
    if (held.defined() && held.nbytes() >= bytes) return;
    if (held.defined()) device_bytes_ -= held.nbytes();
    held = at::Tensor();
    // Whole numbers of any type, and room to grow.
    held = device_bytes((bytes + bytes / 2 + 255) / 256 * 256);
  };
  room(in, in_bytes);
  room(out, out_bytes);

  begun_.set(stream);
  check_cuda(cudaMemcpyAsync(in.data_ptr(), in_.data(), in_bytes, cudaMemcpyHostToDevice, stream),
             "copying a batch to the GPU");
  copied_in_.set(stream);
  if (recorded_ != nullptr) {
    recorded_->graph->replay();
  } else {
    const HostBatch on_device = layout_->over(reinterpret_cast<std::byte*>(in.data_ptr()), shape_);
    compute(on_device, out.view(at::kFloat).narrow(0, 0, batch.rows * width_));
  }
  computed_.set(stream);
  std::byte* const host = out_.take(out_bytes);
  check_cuda(cudaMemcpyAsync(host, out.data_ptr(), out_bytes, cudaMemcpyDeviceToHost, stream),
             "copying scores from the GPU");
  copied_out_.set(stream);
  copied_out_.wait();
  return std::make_unique<GpuScores>(schema_, reinterpret_cast<const float*>(host), batch,
                                     copied_in_.since(begun_) + copied_out_.since(computed_));
}

}  // namespace tessera
