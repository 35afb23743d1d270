#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>

#include <algorithm>
#include <deque>
#include <utility>

#include "common/text.h"
#include "model/gpu_session.h"
#include "model/torchscript_runner.h"
#include "package/package_error.h"

namespace tessera {
namespace {

// One or several replicas of the whole model, each on as many devices as the package has shards.
class GpuRunner final : public Runner {
 public:
  // `placements`: of each copy, the device of each shard.
  GpuRunner(const Opening& opening, const std::string& path, const Manifest& manifest,
            const DeviceTables::Placements& placements, const GpuOptions& options)
      : schema_(manifest.schema),
        // A recording is of one device's work.
        graph_samples_(manifest.num_shards > 1
                           ? 0
                           : std::min(options.max_batch_samples, options.graph_samples)) {
    DeviceTables tables(opening.records(), manifest.records, placements, options.reading,
                        options.changing ? Opening::Sharing::kNo : Opening::Sharing::kYes);
    for (const std::vector<at::Device>& devices : placements) {
      replicas_.emplace_back(opening, path, schema_, devices, tables, options);
      if (!replicas_.back().module.keep_on_device()) {
        throw PackageError(path,
                           "its graph does not end in copies of its outputs to the CPU, as "
                           "packages for 'cuda' do; package the model again");
      }
    }
    if (!options.changing) return;
    DeviceWeights::Places places;
    for (const Replica& replica : replicas_) {
      for (const auto& [record, copies] : replica.module.device_places()) {
        places[record].insert(places[record].end(), copies.begin(), copies.end());
      }
    }
    weights_ = std::make_unique<DeviceWeights>(std::move(places));
  }

  Weights* weights() const override { return weights_.get(); }

  std::vector<std::string> devices() const override {
    std::vector<std::string> names;
    for (const Replica& replica : replicas_) names.push_back(replica.name);
    return names;
  }

  VocabularyBuffers vocabularies() const override {
    return replicas_.front().module.vocabularies();
  }

  std::unique_ptr<Session> open_session(std::size_t device) override {
    Replica& replica = replicas_.at(device);
    return std::make_unique<GpuSession>(replica.module, schema_, replica.device, graph_samples_,
                                        replica.buffer_bytes);
  }

  std::vector<DeviceMemory> memory() const override {
    std::vector<DeviceMemory> held;
    for (const Replica& replica : replicas_) {
      held.push_back({replica.name, "buffers", replica.buffer_bytes.load()});
      for (const auto& [device, bytes] : replica.module.table_bytes()) {
        const auto stats =
            c10::cuda::CUDACachingAllocator::getDeviceStats(static_cast<c10::DeviceIndex>(device));
        const auto reserved = stats
                                  .reserved_bytes[static_cast<std::size_t>(
                                      c10::CachingAllocator::StatType::AGGREGATE)]
                                  .current;
        held.push_back({text("cuda:", device), "tables", bytes});
        // What the whole process holds: tables, buffers, dense weights, activations and graphs.
        held.push_back({text("cuda:", device), "reserved", static_cast<std::uint64_t>(reserved)});
      }
    }
    return held;
  }

 private:
  struct Replica {
    Replica(const Opening& opening, const std::string& path, const InputSchema& schema,
            const std::vector<at::Device>& devices, DeviceTables& tables, const GpuOptions& options)
        : device(devices.at(0).index()),
          name(text("cuda:", device)),
          module(opening, path, schema, devices, tables,
                 options.changing ? TorchScriptModule::Form::kChanging
                                  : TorchScriptModule::Form::kFrozen,
                 options.rest) {}

    int device;  // that its inputs, outputs and first shard are on
    std::string name;
    TorchScriptModule module;
    std::atomic<std::uint64_t> buffer_bytes = 0;
  };

  const InputSchema schema_;
  const std::int64_t graph_samples_;
  std::deque<Replica> replicas_;
  std::unique_ptr<DeviceWeights> weights_;
};

// For each replica of the model, the device of each shard: as many replicas as there are devices
// for, and one at least, whose shards then take turns.
DeviceTables::Placements placements(const std::vector<int>& devices, int shards) {
  DeviceTables::Placements replicas;
  const auto count = static_cast<std::size_t>(shards);
  std::size_t next = 0;
  do {
    std::vector<at::Device> replica;
    for (std::size_t i = 0; i < count; ++i) {
      const int number = devices[(next + i) % devices.size()];
      replica.emplace_back(at::kCUDA, static_cast<c10::DeviceIndex>(number));
    }
    replicas.push_back(std::move(replica));
    next += count;
  } while (next + count <= devices.size());
  return replicas;
}

}  // namespace

std::unique_ptr<Runner> open_on_gpus(const Opening& opening, const std::string& path,
                                     const Manifest& manifest, const GpuOptions& options) {
  const int count = c10::cuda::device_count();
  if (count == 0) {
    throw PackageError(path, "was packaged for device 'cuda', and there is no GPU here");
  }
  std::vector<int> devices = options.devices;
  for (int i = 0; devices.empty() || (options.devices.empty() && i < count); ++i) {
    devices.push_back(i);
  }
  for (const int device : devices) {
    if (device >= count) {
      throw PackageError(path, text("was to be served on GPU ", device, ", but there are ", count,
                                    " here, numbered from 0; change --gpus"));
    }
  }
  return std::make_unique<GpuRunner>(opening, path, manifest,
                                     placements(devices, manifest.num_shards), options);
}

}  // namespace tessera
