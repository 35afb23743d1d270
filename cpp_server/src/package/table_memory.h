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
#include <vector>

#include "common/mutex.h"
#include "package/manifest.h"
#include "package/spare_memory.h"

namespace tessera {

class TableMemory : public std::enable_shared_from_this<TableMemory> {
 public:
  // Any content, in huge pages where the system has them: fewer page faults now, fewer misses of
  // the TLB in every lookup. `spare` must live as long as this.
  explicit TableMemory(std::uint64_t bytes, SpareMemory& spare = SpareMemory::shared());
  // What `spare` has kept of a table of so many bytes, of the content of that key.
  TableMemory(std::uint64_t bytes, std::string content_key, KeptTable kept, SpareMemory& spare);
  ~TableMemory();
  TableMemory(const TableMemory&) = delete;
  TableMemory& operator=(const TableMemory&) = delete;

  std::span<std::byte> content() const { return {begin_, bytes_}; }

  // It has the content of `key` from now on, as in `file`, and `spare` keeps that with the memory.
  void set_content(const std::string& key, const std::string& file);

  // The key of its content; empty: any content.
  const std::string& content_key() const { return content_key_; }

  // Lets the system take its pages until take_back, while nobody reads it; false: it has no content
  // that could be known again, or this system does not do that.
  bool leave();

  // Takes what was kept, or left, back from the system; whether it is whole. If it is not, it has
  // no content any more.
  bool take_back();

  // From now on the destructor keeps nothing.
  void keep_no_more() { keeps_ = false; }

  // From now on destructors keep nothing and do not pause: nobody is served any more.
  static void give_back_at_once();

 private:
  friend class TableStore;

  void find_begin();
  bool find_marks();

  std::byte* begin_ = nullptr;  // within the mapping, where a huge page begins
  std::uint64_t bytes_ = 0;
  KeptTable kept_;
  std::string content_key_;
  bool keeps_ = true;
  int users_ = 0;  // see TableStore, which guards it
  SpareMemory& spare_;
};

// What tables of the same content have in common, and others have not: their size, and the SHA-256
// that the manifest gives (of a record in chunks, those of all of its chunks).
std::string content_key(const RecordInfo& record);

// The tables of this process by their content, so that versions of a model share those that they
// have in common, and a version that comes again has those that were kept (package/spare_memory.h).
// It owns none of them, but counts who uses them: each shared pointer that it gives is a user's,
// and so are the copies of that.
//
// What is compared is the content_key. A table is put here only once its own bytes have been
// compared with that SHA-256. Where one is found, the record of the other file is not read at all:
// that its size and CRC-32 are those of the manifest has been seen in the archive's headers
// (verify_headers), and if the bytes behind them are damaged nobody will ever see them.
//
// Contract: any thread; blocks for microseconds, but take_back, and `find` where it finds a table
// that was kept, for as long as csrc/page_marks.h says, and lend for as long again and as leaving
// takes (SpareMemory::keep). The store outlives the tables that it gives.
class TableStore {
 public:
  using Tables = std::vector<std::shared_ptr<TableMemory>>;

  // The one of this process.
  static TableStore& shared();

  explicit TableStore(SpareMemory& spare = SpareMemory::shared()) : spare_(spare) {}

  // A user of the table with this content; null: there is none. One that nobody uses any more is
  // found only for the file that it was read from, by PackageFile::identity: a file that was
  // written to, or replaced, since then is read again.
  std::shared_ptr<TableMemory> find(const RecordInfo& record, const std::string& file);

  // A new table of so many bytes, of one user.
  std::shared_ptr<TableMemory> make(std::uint64_t bytes);

  // `table` was read from `file` and compared with `record`, and nobody changes it any more.
  void add(const RecordInfo& record, const std::string& file,
           const std::shared_ptr<TableMemory>& table);

  // Lets the system take the pages of these tables until take_back. The caller is their only user,
  // and nobody reads them meanwhile; `find` does not give them. False: others use one of them, or
  // it cannot be left (TableMemory::leave), and then they are as they were.
  bool lend(const Tables& tables);

  // Whether what was lent is whole; otherwise nobody may use it any more.
  bool take_back(const Tables& tables);

 private:
  std::shared_ptr<TableMemory> used(std::shared_ptr<TableMemory> table) TESSERA_REQUIRES(mutex_);
  void share(const std::string& key, const std::shared_ptr<TableMemory>& table)
      TESSERA_REQUIRES(mutex_);

  SpareMemory& spare_;
  Mutex mutex_;
  std::map<std::string, std::weak_ptr<TableMemory>> tables_ TESSERA_GUARDED_BY(mutex_);
};

}  // namespace tessera
