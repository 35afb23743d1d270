#include "model/device_tables.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/Event.h>
#include <c10/core/Storage.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <array>
#include <memory>
#include <span>
#include <utility>

#include "common/mutex.h"
#include "package/table_memory.h"

namespace tessera {
namespace {

// As much as is copied at a time: less costs a CPU more calls, and more keeps the copies of batches
// waiting for longer.
constexpr std::uint64_t kCopyBytes = 1U << 20;

std::pair<at::DeviceType, at::DeviceIndex> key_of(at::Device device) {
  return {device.type(), device.index()};
}

}  // namespace

// The tables that this process has on devices, by their content; it owns none of them.
class DeviceTables::Store {
 public:
  static Store& shared() {
    static Store store;
    return store;
  }

  // Undefined: there is none.
  at::Tensor find(const RecordInfo& record, at::Device device) const {
    const MutexLock lock(mutex_);
    const auto found = tables_.find({content_key(record), key_of(device)});
    if (found == tables_.end()) return {};
    const c10::intrusive_ptr<c10::StorageImpl> storage = found->second.lock();
    if (!storage) return {};
    const auto bytes = static_cast<std::int64_t>(record.bytes);
    return at::empty({0}, at::TensorOptions(at::kByte).device(device))
        .set_(c10::Storage(storage), 0, {bytes}, {1});
  }

  void add(const RecordInfo& record, const at::Tensor& table) {
    const MutexLock lock(mutex_);
    std::erase_if(tables_, [](const auto& known) { return known.second.expired(); });
    tables_.insert_or_assign({content_key(record), key_of(table.device())},
                             table.storage().getWeakStorageImpl());
  }

 private:
  mutable Mutex mutex_;
  std::map<std::pair<std::string, Device>, c10::weak_intrusive_ptr<c10::StorageImpl>> tables_
      TESSERA_GUARDED_BY(mutex_);
};

// Two pieces of memory in turn, of which one is filled while the other one is copied.
class DeviceTables::DeviceStaging final : public Staging {
 public:
  explicit DeviceStaging(const Tables& tables) : tables_(tables) {}
  DeviceStaging(const DeviceStaging&) = delete;
  DeviceStaging& operator=(const DeviceStaging&) = delete;

  ~DeviceStaging() override {
    try {
      wait();
    } catch (const c10::Error&) {  // the device fails, and its memory is of no use to anybody
    }
  }

  std::span<std::byte> room(const std::string& record, std::uint64_t begin,
                            std::uint64_t bytes) override {
    const bool goes_on = record_ != nullptr && *record_ == record && begin == begin_ + filled_;
    if (!goes_on || filled_ + bytes > kCopyBytes) {
      send();
      record_ = &tables_.find(record)->first;
      begin_ = begin;
    }
    given_ = bytes;
    Half& half = halves_[now_];
    if (filled_ == 0) prepare(half);
    return {static_cast<std::byte*>(half.memory.mutable_data_ptr()) + filled_,
            static_cast<std::size_t>(bytes)};
  }

  void filled() override { filled_ += given_; }

  void finish() override {
    send();
    wait();
  }

 private:
  struct Half {
    at::Tensor memory;  // [kCopyBytes] uint8, undefined until it is needed
    std::vector<c10::Event> copies = {};
  };

  // Sees to it that nothing reads `half` any more.
  void prepare(Half& half) const {
    if (!half.memory.defined()) {
      const bool pinned = tables_.at(*record_).begin()->first.first != at::kCPU;
      half.memory = at::empty({static_cast<std::int64_t>(kCopyBytes)},
                              at::TensorOptions(at::kByte).pinned_memory(pinned));
    }
    for (const c10::Event& copy : half.copies) copy.synchronize();
    half.copies.clear();
  }

  // Has what was filled copied.
  void send() {
    if (filled_ == 0) return;
    const at::NoGradGuard none;
    Half& half = halves_[now_];
    const at::Tensor source = half.memory.narrow(0, 0, static_cast<std::int64_t>(filled_));
    for (const auto& [key, table] : tables_.at(*record_)) {
      const at::Tensor target = table.narrow(0, static_cast<std::int64_t>(begin_), source.numel());
      if (table.is_cpu()) {
        target.copy_(source);
        continue;
      }
      const c10::Stream stream = stream_of(table.device());
      const c10::StreamGuard guard(stream);
      target.copy_(source, /*non_blocking=*/true);
      half.copies.emplace_back(table.device().type());
      half.copies.back().record(stream);
    }
    filled_ = 0;
    now_ = 1 - now_;
  }

  c10::Stream stream_of(at::Device device) {
    const auto found = streams_.find(device.index());
    if (found != streams_.end()) return found->second;
    // Of a priority that no session has: torch hands its streams out again and again, and a
    // session may be recording on one.
    constexpr int kPriority = -1;
    const c10::impl::VirtualGuardImpl devices(device.type());
    return streams_.emplace(device.index(), devices.getNewStream(device, kPriority)).first->second;
  }

  void wait() {
    for (Half& half : halves_) {
      for (const c10::Event& copy : half.copies) copy.synchronize();
      half.copies.clear();
    }
  }

  const Tables& tables_;
  std::array<Half, 2> halves_;
  std::size_t now_ = 0;
  std::map<at::DeviceIndex, c10::Stream> streams_;
  // What the half of now holds: `filled_` bytes of the record from `begin_` on.
  const std::string* record_ = nullptr;
  std::uint64_t begin_ = 0;
  std::uint64_t filled_ = 0;
  std::uint64_t given_ = 0;  // by room, and not filled yet
};

DeviceTables::DeviceTables(const Records& records, const Listed& listed, Placements placements,
                           ReadOptions options, Opening::Sharing sharing)
    : records_(records),
      listed_(listed),
      placements_(std::move(placements)),
      options_(std::move(options)),
      sharing_(sharing) {}

DeviceTables::Tables DeviceTables::make_room(
    const std::map<std::string, std::set<std::size_t>>& shards_of) {
  Tables unread;
  for (const auto& [record, shards] : shards_of) {
    const RecordInfo& info = listed_.at(record);
    const auto bytes = static_cast<std::int64_t>(info.bytes);
    for (const std::vector<at::Device>& placement : placements_) {
      for (const std::size_t shard : shards) {
        const at::Device device = placement.at(shard);
        at::Tensor& table = tables_[record][key_of(device)];
        if (table.defined()) continue;
        if (sharing_ == Opening::Sharing::kYes) table = Store::shared().find(info, device);
        if (table.defined()) continue;
        table = at::empty({bytes}, at::TensorOptions(at::kByte).device(device));
        unread[record].emplace(key_of(device), table);
      }
    }
  }
  return unread;
}

void DeviceTables::read(const std::map<std::string, std::set<std::size_t>>& shards_of) {
  if (std::exchange(read_, true)) return;
  const at::NoGradGuard none;
  try {
    const Tables unread = make_room(shards_of);
    ReadOptions options = options_;
    options.into = [&](const std::string& name, const Record& /*record*/) -> Destination {
      if (unread.contains(name)) return {.staged = true};
      const auto found = shards_of.find(name);
      return {.known = found == shards_of.end() || !found->second.empty()};
    };
    options.staging = [&] { return std::make_unique<DeviceStaging>(unread); };
    verify_records(records_, listed_, options);
    if (sharing_ == Opening::Sharing::kNo) return;
    for (const auto& [record, copies] : unread) {
      for (const auto& [device, table] : copies) Store::shared().add(listed_.at(record), table);
    }
  } catch (...) {
    tables_.clear();
    throw;
  }
}

const at::Tensor& DeviceTables::on(const std::string& record, at::Device device) const {
  return tables_.at(record).at(key_of(device));
}

}  // namespace tessera
