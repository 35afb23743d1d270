// What a server needs of a model: one batch in, one array per output out. The interface knows
// neither torch nor gRPC nor a GPU, so that another kind of artifact or device can stand beside
// the ones there are and tests can stand in a plain function.
//
// Legend: B rows of a batch, F features of a group, N ids of a group.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "common/clock.h"
#include "model/vocabularies.h"
#include "model/weights.h"

namespace tessera {

// One group of a batch. What must hold: sum(lengths) == ids(), no length is negative, weights are
// as many as ids or none (a group without weights).
struct HostGroup {
  std::span<std::int32_t> lengths;  // [F * B], feature-major
  std::span<std::int64_t> values;   // [N], feature-major; empty where `narrow` has the ids
  std::span<std::int32_t> narrow;   // [N]
  std::span<float> weights;         // [N]

  std::size_t ids() const { return values.size() + narrow.size(); }
};

// The arguments of the package's `forward`, in memory of the session that reserved them; or, where
// `row_index` is not empty, of its `forward_shared`: the id_list features marked in `shared` then
// have R bags each, one per shared row, where the others have B.
struct HostBatch {
  std::int64_t samples = 0;         // that scores are wanted of
  std::int64_t rows = 0;            // B >= samples; the rows behind the samples are padding
  std::int64_t dense_features = 0;  // F_dense
  std::span<float> dense;           // [B * F_dense], row-major
  HostGroup id_list;
  HostGroup id_score_list;
  std::span<std::uint8_t> shared;     // [F] of id_list: 1 where samples share rows
  std::span<std::int32_t> row_index;  // [B], each in [0, R)
};

// What is known of a batch before it has memory.
struct BatchShape {
  std::int64_t samples = 0;
  std::int64_t plain_ids = 0;        // of the id_list group
  std::int64_t scored_ids = 0;       // of the id_score_list group
  bool narrow = false;               // every id came as int32
  std::int64_t shared_features = 0;  // of the id_list group; only where the runner shares rows
  std::int64_t shared_rows = 0;      // R
};

// The outputs of one batch, valid until the session's next forward.
class Scores {
 public:
  virtual ~Scores() = default;
  // Output `index` of the schema: [samples * width] float32, row-major.
  virtual std::span<const float> output(std::size_t index) const = 0;
  // What copying to and from the device took; zero where nothing is copied.
  virtual Duration transfer() const { return Duration::zero(); }
};

// One worker's way of calling a model: its memory for batches, its stream on its device.
//
// Contract: begin_thread is called once by the thread that will call the rest. reserve gives
// memory that is valid, and the caller's to write, until the next reserve; every row of it must be
// filled, the padding with zeros and empty bags. forward takes what reserve gave, blocks while the
// model computes, may write to the batch's memory, and throws std::exception when the model fails
// or gives something else than its schema promises.
class Session {
 public:
  virtual ~Session() = default;
  virtual void begin_thread(int compute_threads) = 0;
  virtual HostBatch reserve(const BatchShape& shape) = 0;
  virtual std::unique_ptr<Scores> forward(const HostBatch& batch) = 0;
  // Host memory held for batches.
  virtual std::size_t bytes() const = 0;
  // What its operator should know, for the log; empty: nothing.
  virtual std::string remark() const { return ""; }
};

// Bytes that a model holds on a device, for tessera_device_memory_bytes.
struct DeviceMemory {
  std::string device;
  std::string kind;
  std::uint64_t bytes = 0;
};

// A loaded model on one or several devices.
//
// Contract: open_session may take long (it prepares everything that a forward needs) and is called
// by the loading thread; sessions may then be used at the same time, each by one thread, and must
// end before the runner. memory may be called from any thread and does not block.
class Runner {
 public:
  virtual ~Runner() = default;
  // "cpu", or "cuda:0", "cuda:1", ...; at least one, each with the whole model.
  virtual std::vector<std::string> devices() const = 0;
  // Whether its sessions take batches with shared rows.
  virtual bool shares_rows() const { return false; }
  // A session on the device `device` of the list.
  virtual std::unique_ptr<Session> open_session(std::size_t device) = 0;
  // What its vocabularies hold; without keys where it has none. Valid as long as the runner is.
  virtual VocabularyBuffers vocabularies() const { return {}; }
  // Its stored bytes, to be changed in place; null: it was not loaded for that. Valid as long as
  // the runner is.
  virtual Weights* weights() const { return nullptr; }
  // What the model holds on its devices beside its sessions' host memory.
  virtual std::vector<DeviceMemory> memory() const = 0;
};

}  // namespace tessera
