// The stored bytes of a loaded model, record by record of its package, to be changed in place while
// it is served. Tables and dense weights alike: nothing is known of a record but its bytes.
//
// Contract: stage and prepare take no part in serving and may be called by any thread; a
// StagedPatches is used by one thread at a time, and swap only while nothing is computed with the
// model. What was staged must end before the weights.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "common/raw_bytes.h"
#include "package/commit.h"

namespace tessera {

// New bytes for rows of one record. Every row lies in it: who makes a Patch has checked that.
struct Patch {
  PatchInfo info;
  RawBytes rows;   // their numbers: uint32, little-endian; empty: 0, 1, ... count - 1
  RawBytes bytes;  // count * width
};

// Patches that are ready to be written.
class StagedPatches {
 public:
  virtual ~StagedPatches() = default;

  // Does beside serving what would make the first swap take longer, where there is such a thing,
  // and throws std::bad_alloc. `between` is called between pieces of some 100 microseconds; what it
  // throws ends that.
  virtual void prepare(const std::function<void()>& between) { (void)between; }
  void prepare() {
    prepare([] {});
  }

  // Beside serving, right before the first swap: brings near what that takes.
  virtual void fetch() {}

  // Exchanges the staged bytes with the stored ones. So a second call undoes the first. Throws
  // where there is no memory for that, and has changed nothing then.
  virtual void swap() = 0;

  // Whether a swap has left something to do, which must be done before the next one.
  virtual bool unfinished() const { return false; }
  // Beside serving, after a swap that stands: does some 100 microseconds of that; false: it is
  // done. What was computed meanwhile may read what settle lets go of until it has ended.
  virtual bool finish() { return false; }

  // After a swap that stands, and is finished: lets go of what no undoing needs. Later swaps may
  // take longer.
  virtual void settle() {}

  // What it holds.
  virtual std::uint64_t bytes() const = 0;
};

class Weights {
 public:
  virtual ~Weights() = default;

  // Bytes of a record that lies in the model as it is in the package; nothing: there is none.
  virtual std::optional<std::uint64_t> bytes(const std::string& record) const = 0;

  // Whether they lie in this process's memory. Those of a device are staged under locks of its
  // driver, for which whoever serves would wait.
  virtual bool on_host() const = 0;

  // Whether anything is computed with the model, which a swap makes wait.
  enum class Beside { kNothing, kBatches };
  // Throws std::bad_alloc. `between` is called as by prepare.
  virtual std::unique_ptr<StagedPatches> stage(std::vector<Patch> patches, Beside beside,
                                               const std::function<void()>& between) = 0;
  std::unique_ptr<StagedPatches> stage(std::vector<Patch> patches) {
    return stage(std::move(patches), Beside::kNothing, [] {});
  }

  // While nothing is computed with the model: undoes swaps of what was staged here, which stand and
  // are settled, the newest first. What they were is gone then. Throws where there is no memory
  // for that, and has changed nothing then.
  virtual void take_back(const std::vector<std::shared_ptr<StagedPatches>>& newest_first);
};

// New rows of tables that lookups read where they were staged, until they are written: swap takes
// microseconds then (kernels/csrc/row_overlay.h has how, and its contract). The functions are those
// of the operators `overlay_...`.
class LaidRows {
 public:
  virtual ~LaidRows() = default;
  virtual bool keep() = 0;
  virtual void show() = 0;
  virtual void take_back() = 0;
  virtual bool write() = 0;
};

// A patch of a record that lies at `record`. It has rows' numbers.
struct LaidPatch {
  std::span<std::byte> record;
  Patch* patch = nullptr;
};
// Whoever asks keeps the patches where they are for as long as the rows.
using LayRows = std::function<std::unique_ptr<LaidRows>(std::span<const LaidPatch> patches)>;

// Records that lie in this process's memory.
class HostWeights final : public Weights {
 public:
  using Places = std::map<std::string, std::span<std::byte>>;

  // `lay_rows`: null where tables' rows are read by others than lookups that know of laid ones.
  explicit HostWeights(Places places, LayRows lay_rows = nullptr);

  std::optional<std::uint64_t> bytes(const std::string& record) const override;
  bool on_host() const override { return true; }
  using Weights::stage;
  std::unique_ptr<StagedPatches> stage(std::vector<Patch> patches, Beside beside,
                                       const std::function<void()>& between) override;
  void take_back(const std::vector<std::shared_ptr<StagedPatches>>& newest_first) override;

 private:
  const Places places_;
  const LayRows lay_rows_;
  const std::size_t threads_;  // that take commits back
};

}  // namespace tessera
