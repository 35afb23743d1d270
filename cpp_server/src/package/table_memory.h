// Memory of one large table, in a mapping of its own: whatever the heap is like, it is the system's
// again when the last owner lets it go, and the next table's where one comes within two minutes
// (package/spare_memory.h).
//
// Contract: the memory is valid as long as the object is. Construction takes address space alone,
// or memory that is kept, and throws std::bad_alloc; pages that are new become resident as they are
// written to, by the thread that writes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>

#include "common/mutex.h"
#include "package/manifest.h"
#include "package/spare_memory.h"

namespace tessera {

class TableMemory {
 public:
  // Any content, in huge pages where the system has them: fewer page faults now, fewer misses of
  // the TLB in every lookup. `spare` must live as long as this.
  explicit TableMemory(std::uint64_t bytes, SpareMemory& spare = SpareMemory::shared());
  // What `spare` has kept of a table of so many bytes.
  TableMemory(std::uint64_t bytes, KeptTable kept, SpareMemory& spare);
  ~TableMemory();
  TableMemory(const TableMemory&) = delete;
  TableMemory& operator=(const TableMemory&) = delete;

  std::span<std::byte> content() const { return {begin_, bytes_}; }

  // It has the content of `key` from now on, which `spare` keeps with the memory; empty: any
  // content.
  void set_key(std::string key);

  // Takes what was kept back from the system; whether it is whole.
  bool take_back();

  // From now on destructors keep nothing and do not pause: nobody is served any more.
  static void give_back_at_once();

 private:
  void find_begin();

  std::byte* begin_ = nullptr;  // within the mapping, where a huge page begins
  std::uint64_t bytes_ = 0;
  KeptTable kept_;
  SpareMemory& spare_;
};

// What tables of the same content have in common, and others have not: their size, and the SHA-256
// that the manifest gives (of a record in chunks, those of all of its chunks).
std::string content_key(const RecordInfo& record);

// The tables of this process by their content, so that versions of a model share those that they
// have in common, and a version that comes again has those that were kept (package/spare_memory.h).
// It owns none of them.
//
// What is compared is the content_key. A table is put here only once its own bytes have been
// compared with that SHA-256. Where one is found, the record of the other file is not read at all:
// that its size and CRC-32 are those of the manifest has been seen in the archive's headers
// (verify_headers), and if the bytes behind them are damaged nobody will ever see them.
//
// Contract: any thread; blocks for microseconds, and where `find` finds a table that was kept for
// as long as csrc/page_marks.h says.
class TableStore {
 public:
  // The one of this process.
  static TableStore& shared();

  explicit TableStore(SpareMemory& spare = SpareMemory::shared()) : spare_(spare) {}

  // Null: there is none with this content. One that nobody uses any more is found only for the file
  // that it was read from, by PackageFile::identity: a file that was written to, or replaced, since
  // then is read again.
  std::shared_ptr<TableMemory> find(const RecordInfo& record, const std::string& file);

  // `table` was read from `file` and compared with `record`, and nobody changes it any more.
  void add(const RecordInfo& record, const std::string& file,
           const std::shared_ptr<TableMemory>& table);

 private:
  void share(const std::string& key, const std::shared_ptr<TableMemory>& table);

  SpareMemory& spare_;
  Mutex mutex_;
  std::map<std::string, std::weak_ptr<TableMemory>> tables_ TESSERA_GUARDED_BY(mutex_);
};

}  // namespace tessera
