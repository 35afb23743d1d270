// What a server needs of a model: one batch in, one array per output out. The interface knows
// neither torch nor gRPC, so that another kind of artifact can stand beside TorchScript and
// tests can stand in a plain function.
//
// Legend: B samples, F features of a group, N ids of a group.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

namespace tessera {

// One group of a batch. What must hold: sum(lengths) == values.size(), no length is negative,
// weights are as many as values or none (a group without weights).
struct HostGroup {
  std::span<std::int32_t> lengths;  // [F * B], feature-major
  std::span<std::int64_t> values;   // [N], feature-major
  std::span<float> weights;         // [N]
};

// The arguments of the package's `forward`, borrowed from the caller.
struct HostBatch {
  std::int64_t samples = 0;         // B
  std::int64_t dense_features = 0;  // F_dense
  std::span<float> dense;           // [B * F_dense], row-major
  HostGroup id_list;
  HostGroup id_score_list;
};

// The outputs of one batch; owns their memory.
class Scores {
 public:
  virtual ~Scores() = default;
  // Output `index` of the schema: [B * width] float32, row-major.
  virtual std::span<const float> output(std::size_t index) const = 0;
};

// Contract: forward may be called from several threads at once; a thread that will call it
// calls prepare_thread first, once. forward blocks for as long as the model computes, may
// write to the batch's memory, does not keep it, and throws std::exception when the model
// fails or gives something else than its schema promises.
class Runner {
 public:
  virtual ~Runner() = default;
  virtual void prepare_thread(int compute_threads) = 0;
  virtual std::unique_ptr<Scores> forward(const HostBatch& batch) = 0;
};

}  // namespace tessera
