// Large tables on their way from a package's file to its devices.
//
// Each is read once and compared on the way: a thread reads a piece to memory that a device can
// read by itself (pinned), hashes it there and has it copied on a stream of its own while it reads
// the next ones. So the host never holds a table, a device's copies for batches wait for a megabyte
// at most, and the memory that the threads need is 2 MB each. A table that a device has already,
// for another package, is shared, as those of the host are (package/table_memory.h).
//
// Contract: used by one thread; read blocks. Included by files that are compiled against torch.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "model/opening.h"
#include "package/records.h"
#include "package/verify.h"

namespace tessera {

class DeviceTables {
 public:
  // For each copy of the model, the device of each shard.
  using Placements = std::vector<std::vector<at::Device>>;

  // `records`, of which verify_headers has passed, and `listed` must outlive this. `options` say
  // how it is read; of them `into` and `staging` are this class's own.
  DeviceTables(const Records& records, const Listed& listed, Placements placements,
               ReadOptions options, Opening::Sharing sharing = Opening::Sharing::kYes);

  // Reads tables, by their record, each to the devices that its shards have in all copies of the
  // model, or to none where it has no shards: then it is compared. Only the first call does so.
  // Throws PackageError, and what torch throws where a device has no memory left; then there are
  // none.
  void read(const std::map<std::string, std::set<std::size_t>>& shards_of);

  // A table that was read, [bytes] uint8, on one of its devices.
  const at::Tensor& on(const std::string& record, at::Device device) const;

 private:
  // One record, by device.
  using Device = std::pair<at::DeviceType, at::DeviceIndex>;
  using Copies = std::map<Device, at::Tensor>;
  using Tables = std::map<std::string, Copies>;

  class DeviceStaging;
  class Store;

  // Shares or makes what is asked for; gives what has to be read.
  Tables make_room(const std::map<std::string, std::set<std::size_t>>& shards_of);

  const Records& records_;
  const Listed& listed_;
  const Placements placements_;
  const ReadOptions options_;
  const Opening::Sharing sharing_;
  bool read_ = false;
  Tables tables_;
};

}  // namespace tessera
