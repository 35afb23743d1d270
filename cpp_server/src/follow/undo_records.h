// What commits have replaced, so that they can be taken back at once: the newest of them, of all
// versions together no more bytes than --rollback-bytes.
//
// Contract: any thread; blocks for microseconds, and while memory is given back.
#pragma once

#include <cstdint>
#include <list>
#include <memory>

#include "common/mutex.h"
#include "model/weights.h"

namespace tessera {

class UndoRecords {
 public:
  explicit UndoRecords(std::uint64_t max_bytes) : max_bytes_(max_bytes) {}

  // Holds on to what `owner` has staged and swapped, until it is forgotten or newer ones need the
  // room: the oldest go first, whoever's they are. Throws std::bad_alloc, and does not hold it.
  void add(const void* owner, std::shared_ptr<StagedPatches> replaced);

  // Lets all of `owner`'s go, or one of them.
  void forget(const void* owner) noexcept;
  void forget(const std::shared_ptr<StagedPatches>& replaced) noexcept;

  std::uint64_t bytes() const;

 private:
  struct Entry {
    const void* owner;
    std::shared_ptr<StagedPatches> replaced;
    std::uint64_t bytes;
  };

  template <typename Gone>
  void drop(const Gone& gone) noexcept;

  const std::uint64_t max_bytes_;
  mutable Mutex mutex_;
  std::list<Entry> entries_ TESSERA_GUARDED_BY(mutex_);  // the oldest first
  std::uint64_t bytes_ TESSERA_GUARDED_BY(mutex_) = 0;
};

}  // namespace tessera
