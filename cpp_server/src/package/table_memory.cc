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

TableMemory::TableMemory(std::uint64_t bytes, std::string content_key, KeptTable kept,
                         SpareMemory& spare)
    : bytes_(bytes), kept_(std::move(kept)), content_key_(std::move(content_key)), spare_(spare) {
  find_begin();
}

TableMemory::~TableMemory() {
  if (at_once || !keeps_) {
    give_back(kept_.mapping, at_once);
    return;
  }
  if (!find_marks()) kept_.key.clear();
  spare_.keep(std::move(kept_));
}

// False: it has no content, or there is no memory for its marks.
bool TableMemory::find_marks() {
  if (kept_.key.empty()) return false;
  if (!kept_.marks.empty()) return true;
  try {
    kept_.marks = page_marks(content());
  } catch (const std::bad_alloc&) {
    return false;
  }
  return true;
}

void TableMemory::find_begin() {
  const auto address = reinterpret_cast<std::uintptr_t>(kept_.mapping.at);
  begin_ = kept_.mapping.at + (kHugePage - address % kHugePage) % kHugePage;
}

void TableMemory::set_content(const std::string& key, const std::string& file) {
  content_key_ = key;
  kept_.key = kept_key(key, file);
  kept_.marks.clear();
}

bool TableMemory::leave() { return find_marks() && leave_to_system(kept_.mapping); }

bool TableMemory::take_back() {
  if (take_back_pages(content(), kept_.marks)) return true;
  content_key_.clear();
  kept_.key.clear();
  return false;
}

void TableMemory::give_back_at_once() { at_once = true; }

std::string content_key(const RecordInfo& record) {
  std::string key = text(record.bytes, ' ');
  if (record.chunks.empty()) return key + record.sha256;
  for (const std::string& chunk : record.chunks) key += chunk;
  return key;
}

TableStore& TableStore::shared() {
  // Tables may be let go of while the process ends.
  static auto* const store = new TableStore;
  return *store;
}

std::shared_ptr<TableMemory> TableStore::used(std::shared_ptr<TableMemory> table) {
  struct User {
    User(TableStore& its_store, std::shared_ptr<TableMemory> its_table)
        : store(its_store), table(std::move(its_table)) {
      ++table->users_;
    }
    ~User() {
      const MutexLock lock(store.mutex_);
      --table->users_;
    }
    User(const User&) = delete;
    User& operator=(const User&) = delete;

    TableStore& store;
    std::shared_ptr<TableMemory> table;  // which ends without the lock
  };
  TableMemory* const memory = table.get();
  return {std::make_shared<User>(*this, std::move(table)), memory};
}

std::shared_ptr<TableMemory> TableStore::make(std::uint64_t bytes) {
  auto table = std::make_shared<TableMemory>(bytes, spare_);
  const MutexLock lock(mutex_);
  return used(std::move(table));
}

std::shared_ptr<TableMemory> TableStore::find(const RecordInfo& record, const std::string& file) {
  const std::string key = content_key(record);
  {
    const MutexLock lock(mutex_);
    const auto found = tables_.find(key);
    if (found != tables_.end()) {
      if (auto table = found->second.lock(); table != nullptr) return used(std::move(table));
    }
  }
  KeptTable kept = spare_.find(kept_key(key, file));
  if (kept.key.empty()) return nullptr;
  auto table = std::make_shared<TableMemory>(record.bytes, key, std::move(kept), spare_);
  if (!table->take_back()) return nullptr;  // the memory is the next table's all the same
  const MutexLock lock(mutex_);
  share(key, table);
  return used(std::move(table));
}

void TableStore::add(const RecordInfo& record, const std::string& file,
                     const std::shared_ptr<TableMemory>& table) {
  const std::string key = content_key(record);
  table->set_content(key, file);
  const MutexLock lock(mutex_);
  share(key, table);
}

void TableStore::share(const std::string& key, const std::shared_ptr<TableMemory>& table) {
  std::erase_if(tables_, [](const auto& known) { return known.second.expired(); });
  tables_[key] = table->weak_from_this();
}

bool TableStore::lend(const Tables& tables) {
  {
    const MutexLock lock(mutex_);
    for (const auto& table : tables) {
      if (table->users_ != 1 || table->content_key().empty()) return false;
    }
    for (const auto& table : tables) tables_.erase(table->content_key());
  }
  return std::all_of(tables.begin(), tables.end(),
                     [](const auto& table) { return table->leave(); });
}

bool TableStore::take_back(const Tables& tables) {
  bool whole = true;  // each is taken back, so that those that are whole are kept
  for (const auto& table : tables) whole = table->take_back() && whole;
  if (!whole) return false;
  const MutexLock lock(mutex_);
  for (const auto& table : tables) share(table->content_key(), table);
  return true;
}

}  // namespace tessera
