#include "package/table_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <new>
#include <thread>

#include "common/text.h"

namespace tessera {
namespace {

constexpr std::uint64_t kHugePage = 2U << 20;
// What is given back at once: about 0.2 ms of work for the kernel.
constexpr std::uint64_t kPiece = 4U << 20;
constexpr std::chrono::microseconds kPause{200};

std::atomic<bool> at_once = false;

std::string key_of(const RecordInfo& record) {
  std::string key = text(record.bytes, ' ');
  if (record.chunks.empty()) return key + record.sha256;
  for (const std::string& chunk : record.chunks) key += chunk;
  return key;
}

}  // namespace

TableMemory::TableMemory(std::uint64_t bytes)
    : bytes_(bytes), mapping_bytes_((bytes + kHugePage - 1) / kHugePage * kHugePage + kHugePage) {
  void* const mapping = ::mmap(nullptr, mapping_bytes_, PROT_READ | PROT_WRITE,
                               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping == MAP_FAILED) throw std::bad_alloc();
  mapping_ = static_cast<std::byte*>(mapping);
  const auto address = reinterpret_cast<std::uintptr_t>(mapping);
  begin_ = mapping_ + (kHugePage - address % kHugePage) % kHugePage;
  // It may decline. The last piece stays in small pages: a large one would be resident as a whole.
  ::madvise(begin_, bytes / kHugePage * kHugePage, MADV_HUGEPAGE);
}

TableMemory::~TableMemory() {
  // munmap of all of it would hold the address space's lock while every page is freed, and threads
  // that map memory or start another thread would wait. MADV_DONTNEED frees pages with the lock
  // shared, and leaves munmap nothing but the page tables.
  for (std::uint64_t done = 0; done < bytes_ && !at_once; done += kPiece) {
    ::madvise(begin_ + done, std::min(kPiece, bytes_ - done), MADV_DONTNEED);
    std::this_thread::sleep_for(kPause);
  }
  ::munmap(mapping_, mapping_bytes_);
}

void TableMemory::give_back_at_once() { at_once = true; }

TableStore& TableStore::shared() {
  static TableStore store;
  return store;
}

std::shared_ptr<TableMemory> TableStore::find(const RecordInfo& record) const {
  const MutexLock lock(mutex_);
  const auto found = tables_.find(key_of(record));
  return found == tables_.end() ? nullptr : found->second.lock();
}

void TableStore::add(const RecordInfo& record, const std::shared_ptr<TableMemory>& table) {
  const MutexLock lock(mutex_);
  std::erase_if(tables_, [](const auto& known) { return known.second.expired(); });
  tables_[key_of(record)] = table;
}

}  // namespace tessera
