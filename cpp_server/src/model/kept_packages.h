// Packages of versions that nobody uses any more, kept for a while with their tables.
//
// A version that comes again within that time, as where somebody goes back to the one before, is
// there as it was: nothing of its file is read, its module is not opened and has been called
// before. What that takes of the CPUs, calls that are answered meanwhile would wait for.
//
// What its tables have is left to the system meanwhile (TableStore::lend): the kernel takes their
// pages as soon as anybody needs memory, and then the version is loaded anew. So it is where its
// file has been replaced or written to. What a package has beside its tables stays in memory, so
// that only those are kept that have little, and few of them. A package whose file is still being
// hashed is not kept either: its tables are read for that.
//
// Contract: any thread. keep and take block for as long as TableStore::lend and take_back do.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "common/clock.h"
#include "common/kept_for.h"
#include "model/loader.h"
#include "package/spare_memory.h"
#include "package/table_memory.h"

namespace tessera {

class KeptPackages {
 public:
  static constexpr std::size_t kMost = 4;
  static constexpr std::uint64_t kMostOtherBytes = 8U << 20;

  explicit KeptPackages(TableStore& store = TableStore::shared(),
                        Duration keep_for = SpareMemory::kKeepFor);

  // Keeps a package that nobody uses any more, if it can be kept. Throws nothing.
  void keep(LoadedPackage package);

  // The package that was kept of the file at `path`, ready for its first request; nothing: there is
  // none.
  std::optional<LoadedPackage> take(const std::string& path);

  // Keeps none of those any more: another one is loaded, whose tables have the memory of theirs.
  void drop();

 private:
  TableStore& store_;
  KeptFor<LoadedPackage> kept_;
};

}  // namespace tessera
