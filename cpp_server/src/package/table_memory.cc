#include "package/table_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <new>
#include <utility>

#include "common/text.h"
#include "csrc/page_marks.h"

namespace tessera {
namespace {

constexpr std::uint64_t kHugePage = 2U << 20;

std::atomic<bool> at_once = false;

std::string kept_key(const std::string& content, const std::string& file) {
  return text(content, " of ", file);
}

}  // namespace

TableMemory::TableMemory(std::uint64_t bytes, SpareMemory& spare) : bytes_(bytes), spare_(spare) {
  const std::uint64_t whole = (bytes + kHugePage - 1) / kHugePage * kHugePage + kHugePage;
  kept_.mapping = spare.take(whole);
  if (kept_.mapping.at == nullptr) {
    void* const mapping = ::mmap(nullptr, whole, PROT_READ | PROT_WRITE,
                                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapping == MAP_FAILED) throw std::bad_alloc();
    kept_.mapping = {.at = static_cast<std::byte*>(mapping), .bytes = whole};
  }
  find_begin();
  // It may decline. The last piece stays in small pages: a large one would be resident as a whole.
  ::madvise(begin_, bytes / kHugePage * kHugePage, MADV_HUGEPAGE);
}

TableMemory::TableMemory(std::uint64_t bytes, KeptTable kept, SpareMemory& spare)
    : bytes_(bytes), kept_(std::move(kept)), spare_(spare) {
  find_begin();
}

TableMemory::~TableMemory() {
  if (at_once) {
    give_back(kept_.mapping, true);
    return;
  }
  if (!kept_.key.empty() && kept_.marks.empty()) {
    try {
      kept_.marks = page_marks(content());
    } catch (const std::bad_alloc&) {
      kept_.key.clear();
    }
  }
  spare_.keep(std::move(kept_));
}

void TableMemory::find_begin() {
  const auto address = reinterpret_cast<std::uintptr_t>(kept_.mapping.at);
  begin_ = kept_.mapping.at + (kHugePage - address % kHugePage) % kHugePage;
}

void TableMemory::set_key(std::string key) {
  kept_.key = std::move(key);
  kept_.marks.clear();
}

bool TableMemory::take_back() { return take_back_pages(content(), kept_.marks); }

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

std::shared_ptr<TableMemory> TableStore::find(const RecordInfo& record, const std::string& file) {
  const std::string key = content_key(record);
  {
    const MutexLock lock(mutex_);
    const auto found = tables_.find(key);
    if (found != tables_.end()) {
      if (auto table = found->second.lock(); table != nullptr) return table;
    }
  }
  KeptTable kept = spare_.find(kept_key(key, file));
  if (kept.key.empty()) return nullptr;
  auto table = std::make_shared<TableMemory>(record.bytes, std::move(kept), spare_);
  if (!table->take_back()) {
    table->set_key("");  // the memory is the next table's all the same
    return nullptr;
  }
  share(key, table);
  return table;
}

void TableStore::add(const RecordInfo& record, const std::string& file,
                     const std::shared_ptr<TableMemory>& table) {
  const std::string key = content_key(record);
  table->set_key(kept_key(key, file));
  share(key, table);
}

void TableStore::share(const std::string& key, const std::shared_ptr<TableMemory>& table) {
  const MutexLock lock(mutex_);
  std::erase_if(tables_, [](const auto& known) { return known.second.expired(); });
  tables_[key] = table;
}

}  // namespace tessera
