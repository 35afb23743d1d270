#include "follow/undo_records.h"

#include <algorithm>
#include <utility>

namespace tessera {

void UndoRecords::add(const void* owner, std::shared_ptr<StagedPatches> replaced) {
  const std::uint64_t bytes = replaced->bytes();
  std::deque<Entry> gone;  // given back without the mutex
  {
    const MutexLock lock(mutex_);
    entries_.push_back({owner, std::move(replaced), bytes});
    bytes_ += bytes;
    while (bytes_ > max_bytes_) {
      bytes_ -= entries_.front().bytes;
      gone.push_back(std::move(entries_.front()));
      entries_.pop_front();
    }
  }
}

template <typename Gone>
void UndoRecords::drop(const Gone& gone) {
  std::deque<Entry> kept;
  std::deque<Entry> dropped;
  {
    const MutexLock lock(mutex_);
    for (Entry& entry : entries_) {
      if (gone(entry)) bytes_ -= entry.bytes;
      (gone(entry) ? dropped : kept).push_back(std::move(entry));
    }
    entries_.swap(kept);
  }
}

void UndoRecords::forget(const void* owner) {
  drop([&](const Entry& entry) { return entry.owner == owner; });
}

void UndoRecords::forget(const std::shared_ptr<StagedPatches>& replaced) {
  drop([&](const Entry& entry) { return entry.replaced == replaced; });
}

std::uint64_t UndoRecords::bytes() const {
  const MutexLock lock(mutex_);
  return bytes_;
}

}  // namespace tessera
