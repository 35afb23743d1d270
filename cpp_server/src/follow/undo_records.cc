#include "follow/undo_records.h"

#include <iterator>
#include <utility>

namespace tessera {

void UndoRecords::add(const void* owner, std::shared_ptr<StagedPatches> replaced) {
  const std::uint64_t bytes = replaced->bytes();
  std::list<Entry> added;
  added.push_back({owner, std::move(replaced), bytes});
  std::list<Entry> gone;  // given back without the mutex
  const MutexLock lock(mutex_);
  entries_.splice(entries_.end(), added);
  bytes_ += bytes;
  while (bytes_ > max_bytes_) {
    bytes_ -= entries_.front().bytes;
    gone.splice(gone.end(), entries_, entries_.begin());
  }
}

template <typename Gone>
void UndoRecords::drop(const Gone& gone) noexcept {
  std::list<Entry> dropped;  // given back without the mutex
  const MutexLock lock(mutex_);
  for (auto entry = entries_.begin(); entry != entries_.end();) {
    const auto next = std::next(entry);
    if (gone(*entry)) {
      bytes_ -= entry->bytes;
      dropped.splice(dropped.end(), entries_, entry);
    }
    entry = next;
  }
}

void UndoRecords::forget(const void* owner) noexcept {
  drop([&](const Entry& entry) { return entry.owner == owner; });
}

void UndoRecords::forget(const std::shared_ptr<StagedPatches>& replaced) noexcept {
  drop([&](const Entry& entry) { return entry.replaced == replaced; });
}

std::uint64_t UndoRecords::bytes() const {
  const MutexLock lock(mutex_);
  return bytes_;
}

}  // namespace tessera
