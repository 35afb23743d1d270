#include "model/record_places.h"

#include <set>
#include <utility>

namespace tessera {
namespace {

struct Moved {
  RecordAddresses records;  // on the host
  DeviceWeights::Places places;
  std::set<std::string> divided;
};

void note_moved(const at::Tensor& from, const at::Tensor& to, Moved& moved) {
  if (!from.defined() || !from.has_storage()) return;
  const auto record = moved.records.find(from.storage().data());
  if (record == moved.records.end()) return;
  if (from.nbytes() != from.storage().nbytes() || !to.is_contiguous()) {
    moved.divided.insert(record->second);
    return;
  }
  moved.places[record->second].push_back(to.flatten().view(at::kByte));
}

void move_all(torch::jit::Module module, const std::string& prefix,
              const std::function<at::Device(const std::string&)>& device_of, Moved& moved) {
  for (const auto& attribute : module.named_attributes(/*recurse=*/false)) {
    if (!attribute.value.isTensor()) continue;
    const at::Tensor& from = attribute.value.toTensor();
    const at::Tensor to = from.to(device_of(prefix + attribute.name));
    note_moved(from, to, moved);
    module.setattr(attribute.name, to);
  }
  for (const auto& child : module.named_children()) {
    move_all(child.value, prefix + child.name + ".", device_of, moved);
  }
}

}  // namespace

RecordPlaces find_records(const torch::jit::Module& module, const RecordAddresses& addresses,
                          const std::map<std::string, std::uint64_t>& bytes_of) {
  RecordPlaces found;
  const torch::jit::IValue root(module._ivalue());
  root.visit([&](const torch::jit::IValue& value) {
    if (!value.isTensor()) return false;
    const at::Tensor& tensor = value.toTensor();
    if (!tensor.defined() || !tensor.has_storage()) return false;
    const c10::Storage& storage = tensor.storage();
    const auto record = addresses.find(storage.data());
    if (record == addresses.end() || !record->second.starts_with(kDataFolder)) return false;
    if (bytes_of.at(record->second) != storage.nbytes()) return false;
    const bool is_new =
        found.places
            .try_emplace(record->second, static_cast<std::byte*>(storage.mutable_data()),
                         storage.nbytes())
            .second;
    if (is_new) found.storages.push_back(storage);
    return false;
  });
  return found;
}

DeviceWeights::Places move_records(const torch::jit::Module& module,
                                   const HostWeights::Places& places,
                                   const std::function<at::Device(const std::string&)>& device_of) {
  Moved moved;
  for (const auto& [record, place] : places) moved.records[place.data()] = record;
  move_all(module, "", device_of, moved);
  for (const std::string& record : moved.divided) moved.places.erase(record);
  return std::move(moved.places);
}

}  // namespace tessera
