#include "model/record_places.h"

#include <torch/csrc/jit/ir/ir.h>

#include <algorithm>
#include <map>
#include <set>
#include <tuple>
#include <utility>

#include "model/device_copy.h"

namespace tessera {
namespace {

// A tensor's memory on the host, and where it goes.
using Way = std::tuple<const void*, std::size_t, at::ScalarType, c10::DeviceIndex>;

struct Moved {
  RecordAddresses records;          // on the host
  std::map<Way, at::Tensor> whole;  // of which a module may have several: they stay one
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

at::Tensor move_one(const at::Tensor& from, at::Device device, const std::function<void()>& rest,
                    Moved& moved) {
  const bool plain = from.defined() && from.has_storage() && from.nbytes() > 0 &&
                     from.is_contiguous() && !from.is_quantized() && from.device() != device;
  if (!plain) {
    const at::Tensor to = from.to(device);
    note_moved(from, to, moved);
    return to;
  }
  at::Tensor& known =
      moved.whole[{from.const_data_ptr(), from.nbytes(), from.scalar_type(), device.index()}];
  if (known.defined() && known.sizes() == from.sizes()) return known;
  known = copy_in_pieces(from, device, rest);
  note_moved(from, known, moved);
  return known;
}

void move_all(torch::jit::Module module, const std::string& prefix,
              const std::function<at::Device(const std::string&)>& device_of,
              const std::function<void()>& rest, Moved& moved) {
  for (const auto& attribute : module.named_attributes(/*recurse=*/false)) {
    if (!attribute.value.isTensor()) continue;
    const at::Device device = device_of(prefix + attribute.name);
    module.setattr(attribute.name, move_one(attribute.value.toTensor(), device, rest, moved));
  }
  for (const auto& child : module.named_children()) {
    move_all(child.value, prefix + child.name + ".", device_of, rest, moved);
  }
}

void move_constants(torch::jit::Block& block, at::Device device) {
  for (torch::jit::Node* node : block.nodes()) {
    if (node->kind() == c10::prim::Constant && node->hasAttribute(c10::attr::value) &&
        node->kindOf(c10::attr::value) == torch::jit::AttributeKind::t) {
      node->t_(c10::attr::value, node->t(c10::attr::value).to(device));
    }
    for (torch::jit::Block* inner : node->blocks()) move_constants(*inner, device);
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

void move_constants(const torch::jit::Module& module, at::Device device) {
  for (const torch::jit::Module& part : module.modules()) {
    for (const torch::jit::Method& method : part.get_methods()) {
      move_constants(*method.graph()->block(), device);
    }
  }
}

DeviceWeights::Places move_records(const torch::jit::Module& module,
                                   const HostWeights::Places& places,
                                   const std::function<at::Device(const std::string&)>& device_of,
                                   const std::function<void()>& rest) {
  Moved moved;
  for (const auto& [record, place] : places) moved.records[place.data()] = record;
  move_all(module, "", device_of, rest, moved);
  for (const std::string& record : moved.divided) moved.places.erase(record);
  return std::move(moved.places);
}

}  // namespace tessera
