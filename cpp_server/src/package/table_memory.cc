#include "package/table_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <new>

#include "common/text.h"

namespace tessera {
namespace {

constexpr std::uint64_t kHugePage = 2U << 20;

std::atomic<bool> at_once = false;

}  // namespace

TableMemory::TableMemory(std::uint64_t bytes, SpareMemory& spare) : bytes_(bytes), spare_(spare) {
  const std::uint64_t whole = (bytes + kHugePage - 1) / kHugePage * kHugePage + kHugePage;
  mapping_ = spare.take(whole);
  if (mapping_.at == nullptr) {
    void* const mapping = ::mmap(nullptr, whole, PROT_READ | PROT_WRITE,
                                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapping == MAP_FAILED) throw std::bad_alloc();
    mapping_ = {.at = static_cast<std::byte*>(mapping), .bytes = whole};
  }
  const auto address = reinterpret_cast<std::uintptr_t>(mapping_.at);
  begin_ = mapping_.at + (kHugePage - address % kHugePage) % kHugePage;
  // It may decline. The last piece stays in small pages: a large one would be resident as a whole.
  ::madvise(begin_, bytes / kHugePage * kHugePage, MADV_HUGEPAGE);
}

TableMemory::~TableMemory() {
  if (at_once) {
    give_back(mapping_, true);
  } else {
    spare_.keep(mapping_);
  }
}

void TableMemory::give_back_at_once() { at_once = true; }

std::string content_key(const RecordInfo& record) {
  std::string key = text(record.bytes, ' ');
  if (record.chunks.empty()) return key + record.sha256;
  for (const std::string& chunk : record.chunks) key += chunk;
  return key;
}

TableStore& TableStore::shared() {
  static TableStore store;
  return store;
}

std::shared_ptr<TableMemory> TableStore::find(const RecordInfo& record) const {
  const MutexLock lock(mutex_);
  const auto found = tables_.find(content_key(record));
  return found == tables_.end() ? nullptr : found->second.lock();
}

void TableStore::add(const RecordInfo& record, const std::shared_ptr<TableMemory>& table) {
  const MutexLock lock(mutex_);
  std::erase_if(tables_, [](const auto& known) { return known.second.expired(); });
  tables_[content_key(record)] = table;
}

}  // namespace tessera
