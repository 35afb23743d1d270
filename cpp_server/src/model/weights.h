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

  // After a swap that stands: lets go of what no undoing needs. Later swaps may take longer.
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

  // Throws std::bad_alloc. `between` is called as by prepare.
  virtual std::unique_ptr<StagedPatches> stage(std::vector<Patch> patches,
                                               const std::function<void()>& between) = 0;
  std::unique_ptr<StagedPatches> stage(std::vector<Patch> patches) {
    return stage(std::move(patches), [] {});
  }
};

// Records that lie in this process's memory.
class HostWeights final : public Weights {
 public:
  using Places = std::map<std::string, std::span<std::byte>>;

  explicit HostWeights(Places places) : places_(std::move(places)) {}

  std::optional<std::uint64_t> bytes(const std::string& record) const override;
  bool on_host() const override { return true; }
  using Weights::stage;
  std::unique_ptr<StagedPatches> stage(std::vector<Patch> patches,
                                       const std::function<void()>& between) override;

 private:
  const Places places_;
};

}  // namespace tessera
