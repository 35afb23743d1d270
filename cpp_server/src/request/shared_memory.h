// Regions of POSIX shared memory that clients of this machine have registered (Triton's extension
// "system shared memory"), for tensors that do not travel in messages. docs/kserve.md has the
// calls, docs/security.md what is to be feared of them.
//
// A region belongs to its clients, who may change and shrink it at any time. So none is mapped: a
// page behind the end of a file that has shrunk would end the process by SIGBUS where it is read.
// pread and pwrite cannot fault and tell how much there was; process_vm_readv of a mapping of our
// own could not either, but takes the pages one by one, keeps the mapping in the address space and
// is forbidden in many containers. Inputs are copied once, and only the copy is checked and used,
// so that bytes which change later cannot pass a check that they have not met.
//
// A region's object is opened for reading, and once more for writing when an output is to go there.
// O_NONBLOCK keeps the open of a FIFO, or of a file that is leased, from blocking.
//
// Contract: any thread. Nothing blocks for longer than a copy takes. SharedMemory outlives its
// regions, which those who use one share: one that is unregistered meanwhile stays with them.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "common/mutex.h"
#include "common/status.h"
#include "request/bytes.h"

namespace tessera {

// What is said when a region is registered.
struct SharedRegionFacts {
  std::string name;
  std::string key;           // of the POSIX object: NAME or /NAME
  std::uint64_t offset = 0;  // of the region in the object
  std::uint64_t byte_size = 0;
};

class SharedMemory;

class SharedRegion {
 public:
  SharedRegion(SharedMemory& memory, SharedRegionFacts facts, int descriptor);
  ~SharedRegion();
  SharedRegion(const SharedRegion&) = delete;
  SharedRegion& operator=(const SharedRegion&) = delete;

  const SharedRegionFacts& facts() const { return facts_; }

  // Copies the bytes from `offset` of the region on, all of which lie in it; or says why not.
  Status read(std::uint64_t offset, std::span<std::byte> out) const;

  // To be called before the first write.
  Status open_for_writing();
  Status write(std::uint64_t offset, Bytes bytes) const;

 private:
  Status shrunk(std::uint64_t offset, std::size_t bytes) const;

  SharedMemory& memory_;
  const SharedRegionFacts facts_;
  const int descriptor_;
  Mutex mutex_;  // of opening for writing
  std::atomic<int> writable_ = -1;
};

// A part of a region.
struct SharedSpan {
  std::shared_ptr<SharedRegion> region;  // null: there is none
  std::uint64_t offset = 0;              // in the region
  std::uint64_t byte_size = 0;
};

class SharedMemory {
 public:
  struct Limits {
    // One for each region, and another for each that outputs go to.
    std::int64_t descriptors = 1'024;
    std::uint64_t bytes = std::uint64_t{1} << 30;  // of all regions
    std::uint64_t request_bytes = 64 << 20;        // that one request may have in regions
  };

  // The descriptors that regions may have, at most `most`, once the process's limit of open files
  // has been raised for them as far as the system lets it.
  static std::int64_t descriptors_to_be_had(std::int64_t most);

  explicit SharedMemory(const Limits& limits) : limits_(limits) {}
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  const Limits& limits() const { return limits_; }

  Status add(SharedRegionFacts facts);
  // A region that is not there is none to be removed, as in Triton.
  void remove(const std::string& name);
  void remove_all();

  // The region `name`, or with an empty name every one, by its name's order.
  Status list(const std::string& name, std::vector<SharedRegionFacts>& found) const;

  // Null: there is none of that name.
  std::shared_ptr<SharedRegion> find(std::string_view name) const;

 private:
  friend class SharedRegion;
  using Regions = std::map<std::string, std::shared_ptr<SharedRegion>, std::less<>>;

  bool take_descriptor();
  Status make_room(const SharedRegionFacts& facts) TESSERA_REQUIRES(mutex_);

  const Limits limits_;
  std::atomic<std::int64_t> held_descriptors_ = 0;
  std::atomic<std::uint64_t> held_bytes_ = 0;
  mutable Mutex mutex_;
  Regions regions_ TESSERA_GUARDED_BY(mutex_);
};

}  // namespace tessera
