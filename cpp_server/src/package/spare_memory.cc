#include "package/spare_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <utility>
#include <vector>

#include "common/stand_aside.h"
#include "common/thread_name.h"

namespace tessera {
namespace {

// What is given back, or left to the system, at once: 0.2 ms of work for the kernel at most.
constexpr std::uint64_t kPiece = 4U << 20;
constexpr std::chrono::microseconds kPause{200};

TimePoint now() { return std::chrono::steady_clock::now(); }

// Piece by piece, with pauses; whether the system takes the advice. Pieces end where huge pages do:
// the kernel cuts one that is only partly meant into small pages.
bool advise(const Mapping& mapping, int advice) {
  const std::uint64_t before = reinterpret_cast<std::uintptr_t>(mapping.at) % kPiece;
  for (std::uint64_t done = 0; done < mapping.bytes;) {
    if (done > 0) std::this_thread::sleep_for(kPause);
    const std::uint64_t whole = done == 0 ? kPiece - before : kPiece;
    const std::uint64_t bytes = std::min(whole, mapping.bytes - done);
    if (::madvise(mapping.at + done, bytes, advice) != 0) return false;
    done += bytes;
  }
  return true;
}

}  // namespace

void give_back(const Mapping& mapping, bool at_once) {
  // munmap of all of it would hold the address space's lock while every page is freed, and threads
  // that map memory or start another thread would wait. MADV_DONTNEED frees pages with the lock
  // shared, and leaves munmap nothing but the page tables.
  if (!at_once) advise(mapping, MADV_DONTNEED);
  ::munmap(mapping.at, mapping.bytes);
}

SpareMemory& SpareMemory::shared() {
  // Tables may be let go of while the process ends.
  static auto* const spare = new SpareMemory;
  return *spare;
}

SpareMemory::SpareMemory(Duration keep_for) : keep_for_(keep_for) {}

SpareMemory::~SpareMemory() {
  {
    const MutexLock lock(mutex_);
    ends_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
  const MutexLock lock(mutex_);
  for (const Kept& kept : kept_) give_back(kept.table.mapping, true);
}

Mapping SpareMemory::take(std::uint64_t bytes) {
  std::vector<Mapping> room;
  {
    const MutexLock lock(mutex_);
    const auto found = std::find_if(kept_.begin(), kept_.end(), [bytes](const Kept& kept) {
      return kept.table.mapping.bytes == bytes;
    });
    if (found != kept_.end()) {
      const Mapping mapping = found->table.mapping;
      kept_.erase(found);
      return mapping;
    }
    for (std::uint64_t gone = 0; gone < bytes && !kept_.empty(); kept_.pop_front()) {
      room.push_back(kept_.front().table.mapping);
      gone += room.back().bytes;
    }
  }
  for (const Mapping& mapping : room) give_back(mapping, false);
  return {};
}

KeptTable SpareMemory::find(const std::string& key) {
  const MutexLock lock(mutex_);
  const TimePoint at = now();
  const auto found = std::find_if(kept_.begin(), kept_.end(), [&](const Kept& kept) {
    return kept.table.key == key && kept.until > at;
  });
  if (found == kept_.end()) return {};
  KeptTable table = std::move(found->table);
  kept_.erase(found);
  return table;
}

void SpareMemory::keep(KeptTable table) {
  const Mapping mapping = table.mapping;
  if (!advise(mapping, MADV_FREE)) {  // Linux 4.5
    give_back(mapping, false);
    return;
  }
  {
    const MutexLock lock(mutex_);
    kept_.push_back({.table = std::move(table), .until = now() + keep_for_});
    if (!thread_.joinable()) thread_ = std::jthread([this] { run(); });
  }
  changed_.notify_all();
}

void SpareMemory::run() {
  name_thread("spare-memory");
  stand_aside();
  for (;;) {
    Mapping old;
    {
      const MutexLock lock(mutex_);
      while (!ends_ && (kept_.empty() || kept_.front().until > now())) {
        if (kept_.empty()) {
          changed_.wait(mutex_);
        } else {
          changed_.wait_until(mutex_, kept_.front().until);
        }
      }
      if (ends_) return;
      old = kept_.front().table.mapping;
      kept_.pop_front();
    }
    give_back(old, false);
  }
}

}  // namespace tessera
