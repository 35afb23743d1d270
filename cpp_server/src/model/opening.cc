#include "model/opening.h"

#include <ATen/ops/from_blob.h>
#include <caffe2/serialize/read_adapter_interface.h>
#include <torch/csrc/jit/serialization/import.h>
#include <zlib.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <random>
#include <stdexcept>
#include <utility>

#include "model/graph_operators.h"
#include "package/archive_rules.h"
#include "package/format_rules.h"
#include "package/layout.h"
#include "package/package_error.h"
#include "package/verify.h"

namespace tessera {
namespace {

constexpr std::uint64_t kLargeBytes = 1U << 20;  // smaller tables take torch's way
constexpr std::size_t kTokenBytes = 24;
constexpr std::string_view kExtraFolder = "extra/";

class MemoryAdapter final : public caffe2::serialize::ReadAdapterInterface {
 public:
  MemoryAdapter(std::vector<std::byte> content, std::map<std::uint64_t, std::string> starts)
      : content_(std::move(content)), reads_(std::move(starts)) {}

  size_t size() const override { return content_.size(); }

  size_t read(uint64_t offset, void* buffer, size_t count, const char* /*what*/) const override {
    if (offset > content_.size()) return 0;
    const auto given = std::min<size_t>(count, content_.size() - offset);
    std::memcpy(buffer, content_.data() + offset, given);
    reads_.note(offset, buffer);
    return given;
  }

  const RecordAddresses& reads() const { return reads_.reads(); }

 private:
  const std::vector<std::byte> content_;
  mutable RecordReads reads_;
};

std::vector<std::byte> random_token(std::random_device& random) {
  std::vector<std::byte> token(kTokenBytes);
  for (std::byte& byte : token) byte = static_cast<std::byte>(random());
  return token;
}

// Finds each stand-in, wherever the module has it.
void find_tables(const torch::jit::Module& module, const std::string& prefix,
                 const std::map<std::vector<std::byte>, std::string>& names,
                 std::vector<Opening::TablePlace>& tables) {
  for (const auto& attribute : module.named_attributes(/*recurse=*/false)) {
    if (!attribute.value.isTensor()) continue;
    const at::Tensor& tensor = attribute.value.toTensor();
    if (!tensor.defined() || tensor.scalar_type() != at::kByte || tensor.nbytes() != kTokenBytes ||
        !tensor.is_contiguous()) {
      continue;
    }
    const auto* const begin = static_cast<const std::byte*>(tensor.const_data_ptr());
    const auto found = names.find({begin, begin + kTokenBytes});
    if (found == names.end()) continue;
    tables.push_back({.name = prefix + attribute.name,
                      .record = found->second,
                      .owner = module,
                      .attribute = attribute.name});
  }
  for (const auto& child : module.named_children()) {
    find_tables(child.value, prefix + child.name + ".", names, tables);
  }
}

void append(std::vector<std::byte>& out, std::span<const std::byte> piece) {
  out.insert(out.end(), piece.begin(), piece.end());
}

}  // namespace

Opening::Opening(const Records& records, const Manifest& manifest, std::set<std::string> allow_ops,
                 Tables tables, Sharing sharing)
    : records_(records),
      manifest_(manifest),
      allow_ops_(std::move(allow_ops)),
      tables_(tables),
      sharing_(sharing),
      kept_(std::make_shared<Kept>()) {
  const std::string& path = records.file().path();
  verify_headers(records, manifest.records);
  check_names(records);
  data_ = read_verified(records, manifest.records, kDataRecord, kMaxPickleBytes);
  try {
    const Storages storages(data_);
    for (const auto& [name, record] : records.all()) {
      if (record.bytes < kLargeBytes || !name.starts_with(kDataFolder)) continue;
      if (storages.plain(name.substr(std::string_view(kDataFolder).size())))
        kept_->tables.try_emplace(name);
    }
  } catch (const std::invalid_argument& error) {
    throw PackageError(path, error.what());
  }
  if (tables == Tables::kFile && !kept_->tables.empty()) file_ = records.file().mapped();
  if (tables != Tables::kMemory || sharing != Sharing::kYes) return;
  // Before any new table, which could take the memory of one that was kept.
  const std::string file = records.file().identity();
  for (auto& [name, table] : kept_->tables) {
    const auto memory = TableStore::shared().find(manifest_.records.at(name), file);
    if (memory == nullptr) continue;
    table = {.content = memory->content(), .owner = memory, .memory = memory, .read = false};
  }
}

Destination Opening::place(const std::string& name, const Record& record) {
  if (const auto table = kept_->tables.find(name); table != kept_->tables.end()) {
    if (tables_ == Tables::kElsewhere) return {.known = true};
    if (file_.owner != nullptr) {
      table->second = {.content = file_.content.subspan(record.offset, record.bytes),
                       .owner = file_.owner,
                       .memory = nullptr,
                       .read = false};
      return {.known = true};
    }
    const bool known = table->second.owner != nullptr;
    if (!known) {
      const auto memory = TableStore::shared().make(record.bytes);
      table->second = {
          .content = memory->content(), .owner = memory, .memory = memory, .read = true};
    }
    return {.place = table->second.content, .known = known};
  }
  return {.place =
              kept_->contents.emplace(name, std::vector<std::byte>(record.bytes)).first->second};
}

void Opening::share_tables() const {
  if (sharing_ == Sharing::kNo) return;
  for (const auto& [name, table] : kept_->tables) {
    if (!table.read) continue;
    TableStore::shared().add(manifest_.records.at(name), records_.file().identity(), table.memory);
  }
}

std::span<const std::byte> Opening::content(const std::string& name) const {
  const auto found = kept_->contents.find(name);
  if (found == kept_->contents.end()) {
    throw PackageError(records_.file().path(), "record '" + name + "' is missing");
  }
  return found->second;
}

std::vector<std::shared_ptr<TableMemory>> Opening::tables_in_memory() const {
  std::vector<std::shared_ptr<TableMemory>> all;
  for (const auto& [name, table] : kept_->tables) {
    if (table.memory != nullptr) all.push_back(table.memory);
  }
  return all;
}

std::uint64_t Opening::other_bytes() const {
  std::uint64_t bytes = 0;
  for (const auto& [name, content] : kept_->contents) bytes += content.size();
  return bytes;
}

Contents Opening::contents(bool unchanging) const {
  Contents all;
  for (const auto& [name, content] : kept_->contents) all[name] = content;
  if (unchanging) return all;
  for (const auto& [name, table] : kept_->tables) {
    if (table.owner != nullptr) all[name] = table.content;
  }
  return all;
}

Opening::Opened Opening::opened() const {
  check_contents(records_, kept_->contents, allow_ops_);
  StandIns stand_ins;
  std::map<std::vector<std::byte>, std::string> names;
  std::random_device random;
  for (const auto& [name, table] : kept_->tables) {
    stand_ins[name] = random_token(random);
    names[stand_ins[name]] = name;
  }
  if (kept_->contents.at(kDataRecord) != data_) {
    throw PackageError(records_.file().path(),
                       "was changed while it was being loaded; load it again");
  }
  std::map<std::uint64_t, std::string> starts;
  std::vector<std::byte> archive = small_archive(stand_ins, starts);
  const auto adapter = std::make_shared<MemoryAdapter>(std::move(archive), std::move(starts));
  Opened opened{.module = torch::jit::load(adapter, at::kCPU), .tables = {}, .addresses = {}};
  check_operators(opened.module, records_.file().path(), allow_ops_);
  find_tables(opened.module, "", names, opened.tables);
  opened.addresses = adapter->reads();
  return opened;
}

torch::jit::Module Opening::module(RecordPlaces* places) const {
  Opened opened = this->opened();
  for (TablePlace& place : opened.tables) {
    place.put(tensor_over(kept_->tables.at(place.record)));
  }
  if (places != nullptr) {
    for (const auto& [name, table] : kept_->tables) opened.addresses[table.content.data()] = name;
    *places = find_records(opened.module, opened.addresses, record_bytes());
  }
  return std::move(opened.module);
}

std::set<std::string> Opening::tables() const {
  std::set<std::string> names;
  for (const auto& [name, table] : kept_->tables) names.insert(name);
  return names;
}

std::map<std::string, std::uint64_t> Opening::record_bytes() const {
  std::map<std::string, std::uint64_t> bytes;
  for (const auto& [name, record] : records_.all()) bytes[name] = record.bytes;
  return bytes;
}

// The package with `stand_ins` instead of its large tables, and without extra files.
std::vector<std::byte> Opening::small_archive(const StandIns& stand_ins,
                                              std::map<std::uint64_t, std::string>& starts) const {
  std::vector<std::byte> out;
  std::string directory;
  std::uint64_t entries = 0;
  const auto add = [&](const std::string& name, std::span<const std::byte> content) {
    const auto crc = ::crc32_z(0, reinterpret_cast<const Bytef*>(content.data()), content.size());
    const Record record{.bytes = content.size(), .crc32 = static_cast<std::uint32_t>(crc)};
    const std::uint64_t offset = out.size();
    const std::string header = local_header(name, record, offset);
    append(out, std::as_bytes(std::span(header)));
    if (!content.empty()) starts[out.size()] = name;
    append(out, content);
    directory += directory_entry(name, record, offset);
    ++entries;
  };
  for (const auto& [name, record] : records_.all()) {
    if (name.starts_with(kExtraFolder)) continue;
    if (const auto found = stand_ins.find(name); found != stand_ins.end()) {
      add(name, found->second);
    } else if (name == kDataRecord && !stand_ins.empty()) {
      std::map<std::string, std::uint64_t> sizes;
      for (const auto& [table, token] : stand_ins) {
        sizes[table.substr(std::string_view(kDataFolder).size())] = token.size();
      }
      add(name, Storages(data_).with_sizes(sizes));
    } else {
      add(name, kept_->contents.at(name));
    }
  }
  directory += directory_end(entries, directory.size(), out.size());
  append(out, std::as_bytes(std::span(directory)));
  return out;
}

// A tensor that keeps `table` for as long as it lives.
at::Tensor Opening::tensor_over(const Table& table) {
  return at::from_blob(
      table.content.data(), {static_cast<std::int64_t>(table.content.size())},
      [owner = table.owner](void*) {}, at::kByte);
}

}  // namespace tessera
