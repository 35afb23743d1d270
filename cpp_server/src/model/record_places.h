// Where a module has the records of its package: torch's reader reads a stored record straight to
// the memory of its tensors, so the address that it reads to says which record they are.
//
// Contract: free functions and values; any thread. Compiled against torch alone.
#pragma once

#include <c10/core/Storage.h>
#include <torch/csrc/jit/api/module.h>

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "model/device_weights.h"
#include "model/weights.h"

namespace tessera {

inline constexpr const char* kDataFolder = "data/";

// Records by the address that they were read to, or lie at.
using RecordAddresses = std::map<const void*, std::string>;

// Notes what is read of an archive.
class RecordReads {
 public:
  // `starts`: where the contents of the archive's records begin.
  explicit RecordReads(std::map<std::uint64_t, std::string> starts) : starts_(std::move(starts)) {}

  void note(std::uint64_t offset, const void* buffer) {
    if (const auto record = starts_.find(offset); record != starts_.end()) {
      reads_[buffer] = record->second;
    }
  }

  // By the address that each was last read to.
  const RecordAddresses& reads() const { return reads_; }

 private:
  const std::map<std::uint64_t, std::string> starts_;
  RecordAddresses reads_;
};

struct RecordPlaces {
  HostWeights::Places places = {};
  std::vector<c10::Storage> storages = {};  // keep that memory
};

// Of the records below "data/" at `addresses`, those that are a whole storage of `module` now; what
// a
// __setstate__ has packed is none of them. `bytes_of`: their sizes.
RecordPlaces find_records(const torch::jit::Module& module, const RecordAddresses& addresses,
                          const std::map<std::string, std::uint64_t>& bytes_of);

// Moves every tensor of `module`, one after the other and in pieces (device_copy.h), to the device
// that `device_of` gives for its qualified name; a tensor that it has twice stays one. Gives where
// the records of `places`, which were on the host, are then; not those of which the module has a
// part by itself.
DeviceWeights::Places move_records(const torch::jit::Module& module,
                                   const HostWeights::Places& places,
                                   const std::function<at::Device(const std::string&)>& device_of,
                                   const std::function<void()>& rest);

// Moves the tensors that the graphs of `module`'s methods have as constants, which reading an
// archive to a device does as well.
void move_constants(const torch::jit::Module& module, at::Device device);

}  // namespace tessera
