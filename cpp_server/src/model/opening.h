// From verified records to a scripted module, without a second look at the file.
//
// What torch opens is an archive in memory made of the very bytes that were verified. In that
// archive the large tables are stand-ins of a few bytes: the tables themselves are read straight
// to where they stay. Included by files that are compiled against torch.
//
// Contract: used by one thread. The spans that place and contents give are valid for as long as
// `kept` is held.
#pragma once

#include <torch/csrc/jit/api/module.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "model/record_places.h"
#include "package/manifest.h"
#include "package/records.h"
#include "package/storages.h"
#include "package/table_memory.h"
#include "package/verify.h"

namespace tessera {

class Opening {
 public:
  // Where large tables lie: in memory of this process; or (kFile) in the file, mapped and not
  // compared with its hashes, for whoever only tries whether the package's code comes back; or
  // (kElsewhere) where who opens the module puts them (device_tables.h).
  enum class Tables { kMemory, kFile, kElsewhere };

  // Whether a large table may be one that another package has been opened with, and the other way
  // round: not where it is to be changed.
  enum class Sharing { kYes, kNo };

  // Compares the records' headers with the manifest and reads, compares and looks through the
  // record that names the tensors. Large tables that this process has already (TableStore) are
  // taken from there. `records` and `manifest` must outlive this; `allow_ops` are
  // operators that the package's code may call beside those that every package may. Throws
  // PackageError.
  Opening(const Records& records, const Manifest& manifest, std::set<std::string> allow_ops,
          Tables tables = Tables::kMemory, Sharing sharing = Sharing::kYes);

  // Where a record's content goes; for verify_records. A large table that was there already is not
  // read again; with tables of the file, or elsewhere, none is.
  Destination place(const std::string& name, const Record& record);

  // Lets later packages share the tables; verify_records must have passed.
  void share_tables() const;

  // A record that was verified.
  std::span<const std::byte> content(const std::string& name) const;

  // All that were placed, or only those that are never changed: copies of what the module has.
  Contents contents(bool unchanging = false) const;

  // What holds the memory of all that was placed.
  std::shared_ptr<const void> kept() const { return kept_; }

  // The archive whose records these are.
  const Records& records() const { return records_; }

  // The large tables that are in memory of this process, and what else was placed has.
  std::vector<std::shared_ptr<TableMemory>> tables_in_memory() const;
  std::uint64_t other_bytes() const;

  // The records that are large tables.
  std::set<std::string> tables() const;

  // Where a module has a large table.
  struct TablePlace {
    std::string name;  // qualified, within the whole module
    std::string record;
    torch::jit::Module owner;
    std::string attribute;  // of the owner

    void put(const at::Tensor& table) { owner.setattr(attribute, table); }
  };

  // A module on the CPU whose large tables are stand-ins.
  struct Opened {
    torch::jit::Module module;
    std::vector<TablePlace> tables;
    RecordAddresses addresses;  // of the other records
  };

  // The module, whose graph calls nothing but allowed operators; verify_records must have passed
  // for all but large tables. It must not be called before it has these.
  // Throws PackageError, and what torch throws.
  Opened opened() const;

  // The same with its tables, which are on the host. `places`, where it is not null, is told where
  // the module has the records below "data/" that it has as they are.
  torch::jit::Module module(RecordPlaces* places = nullptr) const;

  // The sizes of all records, by their names.
  std::map<std::string, std::uint64_t> record_bytes() const;

 private:
  struct Table {
    std::span<std::byte> content;
    std::shared_ptr<const void> owner;    // of the content
    std::shared_ptr<TableMemory> memory;  // the owner where that is memory of this process
    bool read = false;                    // the content was read for this package
  };
  struct Kept {
    std::map<std::string, std::vector<std::byte>> contents;
    std::map<std::string, Table> tables;
  };

  // Large tables by their record, with what stands in for them.
  using StandIns = std::map<std::string, std::vector<std::byte>>;

  static at::Tensor tensor_over(const Table& table);
  // `starts` is told where the records' contents begin in it.
  std::vector<std::byte> small_archive(const StandIns& stand_ins,
                                       std::map<std::uint64_t, std::string>& starts) const;
  const Records& records_;
  const Manifest& manifest_;
  const std::set<std::string> allow_ops_;
  const Tables tables_;
  const Sharing sharing_;
  std::vector<std::byte> data_;  // of kDataRecord
  MappedFile file_;              // kFile: all of it
  std::shared_ptr<Kept> kept_;
};

}  // namespace tessera
