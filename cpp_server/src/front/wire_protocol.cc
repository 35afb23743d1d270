#include "front/wire_protocol.h"

#include <algorithm>
#include <span>
#include <utility>
#include <vector>

#include "common/text.h"
#include "request/infer_decoder.h"
#include "request/infer_wire.h"
#include "request/wire_writer.h"

namespace tessera {
namespace {

constexpr std::size_t kMaxTrafficKeyBytes = 1'024;

Status check_traffic_key(std::string_view field, std::string_view key) {
  if (key.size() <= kMaxTrafficKeyBytes) return {};
  return Status::invalid(
      text(field, " has ", key.size(), " bytes, the limit is ", kMaxTrafficKeyBytes));
}

class PredictProtocol final : public WireProtocol {
 public:
  std::unique_ptr<WireProtocol> another() const override { return make_predict_protocol(); }
  std::string_view method_name() const override { return "Predict"; }
  std::string_view message_name() const override { return "PredictionRequest"; }
  bool parse(Bytes message) override { return parse_request(message, view_); }
  std::string_view model_name() const override { return view_.model_name; }
  std::string_view model_version() const override { return view_.model_version; }

  Status read_traffic_key(std::string_view& key) const override {
    key = view_.traffic_key;
    return check_traffic_key("traffic_key", key);
  }

  Status decode(const ServedModel& model, TimePoint /*began*/, PendingRequest& call) override {
    call.priority = view_.priority;
    return model.decoder().decode(view_, call.request);
  }

  std::size_t response_bytes(const ResponseParts& parts) const override {
    return tessera::response_bytes(parts);
  }
  void write(const ResponseParts& parts, std::byte* out) const override {
    write_response(parts, out);
  }
  std::size_t copied_bytes(const ServedModel& model, const DecodedRequest& request) const override {
    const std::size_t ids = request.joined.string_id_bytes();
    if (!view_.shared_features.present) return ids;
    return ids + request.joined.used_bytes() +
           static_cast<std::size_t>(model.request_bytes().shared_bytes(view_.shared_features));
  }
  std::size_t held_bytes() const override {
    return view_.shared_features.names.capacity() * sizeof(std::string_view);
  }
  void free_memory() override { view_ = {}; }

 private:
  PredictionRequestView view_;
};

class InferProtocol final : public WireProtocol {
 public:
  explicit InferProtocol(InferRegions regions) : regions_(regions) {}

  std::unique_ptr<WireProtocol> another() const override {
    return std::make_unique<InferProtocol>(InferRegions{.appended = regions_.allowed()});
  }
  std::size_t copy_bytes(Bytes message) const override {
    std::size_t bytes = message.size();
    for (const Bytes content : placed_inputs()) {
      bytes += delimited_bytes(kRawContents, content.size());
    }
    return bytes;
  }
  std::vector<std::byte> copy(Bytes message) const override {
    std::vector<std::byte> made(copy_bytes(message));
    WireWriter writer(made.data());
    writer.raw(message.data(), message.size());
    for (const Bytes content : placed_inputs()) {
      writer.tag(kRawContents, WireType::kBytes);
      writer.varint(content.size());
      writer.raw(content.data(), content.size());
    }
    return made;
  }
  std::string_view method_name() const override { return "ModelInfer"; }
  std::string_view message_name() const override { return "ModelInferRequest"; }
  bool parse(Bytes message) override { return parse_infer(message, view_); }
  std::string_view model_name() const override { return view_.model_name; }
  std::string_view model_version() const override { return view_.model_version; }

  Status read_traffic_key(std::string_view& key) const override {
    const ParameterView& parameter = view_.traffic_key;
    key = view_.id;
    if (parameter.key.empty()) return {};
    if (parameter.kind != ParameterView::Kind::kString) {
      return Status::invalid("parameter 'traffic_key' is not a string");
    }
    if (!parameter.string.empty()) key = parameter.string;
    return check_traffic_key("parameter 'traffic_key'", parameter.string);
  }

  Status decode(const ServedModel& model, TimePoint began, PendingRequest& call) override {
    InferOptions options;
    Status status = read_options(view_, options);
    const InferDecoder& decoder = model.infer_decoder();
    places_.clear();
    if (status.ok()) status = decoder.decode(view_, regions_, storage_, tensors_);
    if (status.ok()) status = decoder.choose_outputs(view_, regions_, chosen_);
    if (status.ok()) status = model.decoder().decode(tensors_, call.request, kInferNames);
    if (!status.ok()) return status;
    samples_ = call.request.samples;
    tells_timings_ = options.timings;
    if (regions_.memory != nullptr) {
      status = decoder.place_outputs(view_, *regions_.memory, samples_, chosen_, places_);
      if (!status.ok()) return status;
    }
    call.priority = options.priority;
    if (options.timeout > Duration::zero()) {
      const auto whole = std::chrono::floor<std::chrono::seconds>(options.timeout);
      call.deadline = std::min(call.deadline, later(began, whole, options.timeout - whole));
    }
    return {};
  }

  std::size_t response_bytes(const ResponseParts& parts) const override {
    return infer_response_bytes(infer_parts(parts));
  }
  void write(const ResponseParts& parts, std::byte* out) const override {
    write_infer_response(infer_parts(parts), out);
  }
  std::size_t copied_bytes(const ServedModel& /*model*/,
                           const DecodedRequest& request) const override {
    return storage_.copied_bytes + request.joined.string_id_bytes();
  }
  Status write_elsewhere(const ResponseParts& parts) const override {
    for (std::size_t at = 0; at < places_.size(); ++at) {
      const SharedSpan& place = places_[at];
      if (place.region == nullptr) continue;
      const OutputView& output = parts.outputs[chosen_[at]];
      Status status =
          place.region->write(place.offset, std::as_bytes(std::span(output.data, output.count)));
      if (!status.ok()) return of_tensor("output", output.name, std::move(status));
    }
    return {};
  }
  void end_call() override { places_.clear(); }
  std::size_t held_bytes() const override { return storage_.bytes(); }
  void free_memory() override {
    end_call();
    view_ = {};
    tensors_ = {};
    storage_ = {};
  }

 private:
  InferResponseParts infer_parts(const ResponseParts& parts) const {
    return {.outputs = parts.outputs,
            .chosen = chosen_,
            .places = places_,
            .samples = samples_,
            .model_name = parts.model_name,
            .model_version = parts.model_version,
            .id = view_.id,
            .commit = parts.commit,
            .timings = tells_timings_ ? &parts.timings : nullptr};
  }

  // The contents that the message has elsewhere, in its inputs' order.
  std::vector<Bytes> placed_inputs() const {
    std::vector<Bytes> contents;
    for (std::size_t at = 0; at < storage_.region_count; ++at) {
      contents.emplace_back(storage_.contents[storage_.regions[at]]);
    }
    return contents;
  }

  const InferRegions regions_;
  InferRequestView view_;
  InferStorage storage_;
  PredictionRequestView tensors_;
  std::vector<std::size_t> chosen_;
  std::vector<SharedSpan> places_;  // see InferDecoder::place_outputs
  std::int64_t samples_ = 0;
  bool tells_timings_ = false;
};

}  // namespace

std::unique_ptr<WireProtocol> make_predict_protocol() {
  return std::make_unique<PredictProtocol>();
}

std::unique_ptr<WireProtocol> make_infer_protocol(SharedMemory* memory) {
  return std::make_unique<InferProtocol>(InferRegions{.memory = memory});
}

}  // namespace tessera
