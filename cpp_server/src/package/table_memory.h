// Memory of one large table, in a mapping of its own: whatever the heap is like, it goes back to
// the system when the last owner lets it go.
//
// Contract: the memory is valid as long as the object is. Construction takes address space alone
// and throws std::bad_alloc; pages become resident as they are written to, by the thread that
// writes. The destructor gives the pages back piece by piece, with pauses, so that no other thread
// waits for long for the address space or for a CPU: it blocks for some 100 ms a gigabyte.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>

#include "common/mutex.h"
#include "package/manifest.h"

namespace tessera {

class TableMemory {
 public:
  // Zeros, in huge pages where the system has them: fewer page faults now, fewer misses of the TLB
  // in every lookup.
  explicit TableMemory(std::uint64_t bytes);
  ~TableMemory();
  TableMemory(const TableMemory&) = delete;
  TableMemory& operator=(const TableMemory&) = delete;

  std::span<std::byte> content() const { return {begin_, bytes_}; }

  // From now on destructors do not pause: nobody is served any more.
  static void give_back_at_once();

 private:
  std::byte* begin_ = nullptr;  // within the mapping, where a huge page begins
  std::uint64_t bytes_ = 0;
  std::byte* mapping_ = nullptr;
  std::uint64_t mapping_bytes_ = 0;
};

// The tables of this process by their content, so that versions of a model share those that they
// have in common. It owns none of them.
//
// What is compared: the SHA-256 that the manifest gives (of a record in chunks, those of all of its
// chunks) and the number of bytes. A table is put here only once its own bytes have been compared
// with that SHA-256. Where one is found, the record of the other file is not read at all: that its
// size and CRC-32 are those of the manifest has been seen in the archive's headers
// (verify_headers), and if the bytes behind them are damaged nobody will ever see them.
//
// Contract: any thread; blocks for microseconds.
class TableStore {
 public:
  // The one of this process.
  static TableStore& shared();

  // Null: there is none with this content.
  std::shared_ptr<TableMemory> find(const RecordInfo& record) const;

  // `table` has been compared with `record`.
  void add(const RecordInfo& record, const std::shared_ptr<TableMemory>& table);

 private:
  mutable Mutex mutex_;
  std::map<std::string, std::weak_ptr<TableMemory>> tables_ TESSERA_GUARDED_BY(mutex_);
};

}  // namespace tessera
