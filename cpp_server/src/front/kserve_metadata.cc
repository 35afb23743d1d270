#include "front/kserve_metadata.h"

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <string_view>
#include <utility>

#include "common/text.h"
#include "front/repository_calls.h"
#include "metrics/model_statistics.h"
#include "request/field_names.h"

namespace tessera {
namespace {

constexpr const char* kPlatform = "pytorch_torchscript";
constexpr std::int64_t kAnySize = -1;
// The parameter's numbers count down from the queue's highest priority.
constexpr std::uint64_t kPriorityLevels = 2'147'483'647;

// Calls add(name, datatype, dims) for each input of the model.
template <typename Add>
void visit_inputs(const InputSchema& schema, const Add& add) {
  using Dims = std::initializer_list<std::int64_t>;
  const auto dense = static_cast<std::int64_t>(schema.dense_features.size());
  if (dense > 0) add(kInferNames.dense, "FP32", Dims{kAnySize, dense});
  for (const auto& [group, names] : {std::pair{Group::kIdList, &kInferNames.plain},
                                     std::pair{Group::kIdScoreList, &kInferNames.scored}}) {
    if (schema.group(group).empty()) continue;
    add(names->lengths, "INT32", Dims{kAnySize});
    add(names->values, "INT64", Dims{kAnySize});
    if (!names->weights.empty()) add(names->weights, "FP32", Dims{kAnySize});
  }
}

// The names of the features of each group that the model has, in their order, as JSON.
std::string feature_names(const InputSchema& schema) {
  using Json = nlohmann::ordered_json;
  Json groups = Json::object();
  if (!schema.dense_features.empty()) groups["float_features"] = schema.dense_features;
  for (const auto& [group, key] : {std::pair{Group::kIdList, "id_list_features"},
                                   std::pair{Group::kIdScoreList, "id_score_list_features"}}) {
    for (const auto& feature : schema.group(group)) groups[key].push_back(feature.name);
  }
  return groups.dump(-1, ' ', false, Json::error_handler_t::replace);
}

std::vector<std::int64_t> dims_of(const OutputSpec& output) {
  if (output.width == 1) return {kAnySize};
  return {kAnySize, output.width};
}

inference::DataType data_type(std::string_view datatype) {
  inference::DataType type = inference::TYPE_INVALID;
  inference::DataType_Parse("TYPE_" + std::string(datatype), &type);
  return type;
}

void set_duration(const CountedTime& time, inference::StatisticDuration& duration) {
  duration.set_count(time.count);
  duration.set_ns(time.ns);
}

Status check_repository(const std::string& name) {
  if (name.empty()) return {};
  return Status::invalid(text("repository_name is '", name,
                              "', expected '': the models given at start are the only repository"));
}

template <typename Request>
Parameters parameters_of(const Request& request) {
  using Choice = inference::ModelRepositoryParameter;
  Parameters parameters;
  for (const auto& [name, value] : request.parameters()) {
    Parameter& parameter = parameters[name];
    parameter = OtherParameter{};
    if (value.parameter_choice_case() == Choice::kStringParam) parameter = value.string_param();
    if (value.parameter_choice_case() == Choice::kInt64Param) parameter = value.int64_param();
  }
  return parameters;
}

// The numbers of the GPUs that a model is on: of "cuda:1" 1.
void add_gpus(const std::vector<std::string>& devices, inference::ModelInstanceGroup& group) {
  for (const std::string_view name : devices) {
    const auto colon = name.find(':');
    int number = 0;
    if (colon == std::string_view::npos) continue;
    std::from_chars(name.data() + colon + 1, name.data() + name.size(), number);
    group.add_gpus(number);
  }
}

}  // namespace

Status KserveMetadata::answer(const inference::ServerLiveRequest&,
                              inference::ServerLiveResponse& response) const {
  response.set_live(true);
  return {};
}

Status KserveMetadata::answer(const inference::ServerReadyRequest&,
                              inference::ServerReadyResponse& response) const {
  response.set_ready(facts_.registry.ready() && !facts_.draining());
  return {};
}

Status KserveMetadata::answer(const inference::ModelReadyRequest& request,
                              inference::ModelReadyResponse& response) const {
  Status status;
  const bool found = facts_.registry.find(request.name(), request.version(), status) != nullptr;
  if (status.code == Code::kUnavailable) status = {};
  response.set_ready(found && !facts_.draining());
  return status;
}

Status KserveMetadata::answer(const inference::ServerMetadataRequest&,
                              inference::ServerMetadataResponse& response) const {
  response.set_name("tessera");
  response.set_version(facts_.version);
  for (const char* extension : {"binary_tensor_data", "model_configuration", "model_repository",
                                "schedule_policy", "statistics"}) {
    response.add_extensions(extension);
  }
  if (has_shared_memory()) response.add_extensions("system_shared_memory");
  return {};
}

Status KserveMetadata::answer(const inference::ModelMetadataRequest& request,
                              inference::ModelMetadataResponse& response) const {
  Status status;
  const auto model = facts_.registry.find(request.name(), request.version(), status);
  if (model == nullptr) return status;
  response.set_name(model->name());
  if (request.version().empty()) {
    for (const auto& each : facts_.registry.loaded()) {
      if (each->name() == model->name()) response.add_versions(each->version());
    }
  } else {
    response.add_versions(model->version());
  }
  response.set_platform(kPlatform);
  const InputSchema& schema = model->manifest().schema;
  visit_inputs(schema, [&](std::string_view name, const char* datatype, const auto& dims) {
    auto& input = *response.add_inputs();
    input.set_name(std::string(name));
    input.set_datatype(datatype);
    for (const std::int64_t dim : dims) input.add_shape(dim);
  });
  for (const OutputSpec& spec : schema.outputs) {
    auto& output = *response.add_outputs();
    output.set_name(spec.name);
    output.set_datatype("FP32");
    for (const std::int64_t dim : dims_of(spec)) output.add_shape(dim);
  }
  return {};
}

Status KserveMetadata::answer(const inference::ModelConfigRequest& request,
                              inference::ModelConfigResponse& response) const {
  Status status;
  const auto model = facts_.registry.find(request.name(), request.version(), status);
  if (model == nullptr) return status;
  describe(*model, *response.mutable_config());
  return {};
}

void KserveMetadata::describe(const ServedModel& model, inference::ModelConfig& config) const {
  const Manifest& manifest = model.manifest();
  config.set_name(model.name());
  config.set_platform(kPlatform);
  config.set_backend("tessera");
  visit_inputs(manifest.schema, [&](std::string_view name, const char* datatype, const auto& dims) {
    auto& input = *config.add_input();
    input.set_name(std::string(name));
    input.set_data_type(data_type(datatype));
    for (const std::int64_t dim : dims) input.add_dims(dim);
  });
  for (const OutputSpec& spec : manifest.schema.outputs) {
    auto& output = *config.add_output();
    output.set_name(spec.name);
    output.set_data_type(inference::TYPE_FP32);
    for (const std::int64_t dim : dims_of(spec)) output.add_dims(dim);
  }
  auto& batching = *config.mutable_dynamic_batching();
  batching.set_max_queue_delay_microseconds(static_cast<std::uint64_t>(
      std::chrono::duration_cast<std::chrono::microseconds>(model.batch_limits().max_delay)
          .count()));
  batching.set_priority_levels(kPriorityLevels);
  batching.set_default_priority_level(kPriorityLevels);
  batching.mutable_default_queue_policy()->set_max_queue_size(
      static_cast<std::uint32_t>(std::min<std::int64_t>(
          model.queue_limits().max_requests, std::numeric_limits<std::uint32_t>::max())));
  auto& group = *config.add_instance_group();
  group.set_name(model.name());
  group.set_kind(manifest.device == "cpu" ? inference::ModelInstanceGroup::KIND_CPU
                                          : inference::ModelInstanceGroup::KIND_GPU);
  group.set_count(model.plan().ordinary + model.plan().spare);
  add_gpus(model.devices(), group);
  config.set_default_model_filename(std::filesystem::path(model.path()).filename().string());
  const std::pair<const char*, std::string> parameters[] = {
      {"tessera_max_batch_samples", text(model.batch_limits().max_samples)},
      {"tessera_max_batch_ids", text(model.batch_limits().max_ids)},
      {"features", feature_names(manifest.schema)},
      {"weight_dtype", manifest.dtype},
      {"sha256", model.sha256()}};
  for (const auto& [name, value] : parameters) {
    (*config.mutable_parameters())[name].set_string_value(value);
  }
  if (model.metrics().follow.followed) {
    (*config.mutable_parameters())["commit"].set_string_value(
        text(model.metrics().follow.commit.load()));
  }
}

Status KserveMetadata::answer(const inference::ModelStatisticsRequest& request,
                              inference::ModelStatisticsResponse& response) const {
  if (request.name().empty()) {
    for (const auto& model : facts_.registry.loaded()) count(*model, *response.add_model_stats());
    return {};
  }
  Status status;
  const auto model = facts_.registry.find(request.name(), request.version(), status);
  if (model != nullptr) count(*model, *response.add_model_stats());
  return status;
}

void KserveMetadata::count(const ServedModel& model, inference::ModelStatistics& statistics) const {
  const tessera::ModelStatistics counted =
      statistics_of(model.metrics(), facts_.clock.now(), std::chrono::system_clock::now());
  statistics.set_name(model.name());
  statistics.set_version(model.version());
  statistics.set_last_inference(counted.last_inference_ms);
  statistics.set_inference_count(counted.samples);
  statistics.set_execution_count(counted.batches);
  auto& times = *statistics.mutable_inference_stats();
  set_duration(counted.success, *times.mutable_success());
  set_duration(counted.fail, *times.mutable_fail());
  set_duration(counted.queue, *times.mutable_queue());
  set_duration(counted.compute_input, *times.mutable_compute_input());
  set_duration(counted.compute_infer, *times.mutable_compute_infer());
  set_duration(counted.compute_output, *times.mutable_compute_output());
}

Status KserveMetadata::answer(const inference::RepositoryIndexRequest& request,
                              inference::RepositoryIndexResponse& response) const {
  if (Status status = check_repository(request.repository_name()); !status.ok()) {
    return status;
  }
  for (const IndexEntry& known : index_entries(facts_)) {
    if (request.ready() && known.state != VersionState::kReady) continue;
    auto& entry = *response.add_models();
    entry.set_name(known.model);
    entry.set_version(known.version);
    entry.set_state(std::string(state_name(known.state)));
    entry.set_reason(known.reason);
    for (const std::string& label : known.labels) entry.add_labels(label);
    entry.set_traffic_percent(known.percent);
    entry.set_shadow(known.shadow);
    entry.set_load_progress(known.progress);
  }
  return {};
}

Status KserveMetadata::answer(const inference::SystemSharedMemoryStatusRequest& request,
                              inference::SystemSharedMemoryStatusResponse& response) const {
  std::vector<SharedRegionFacts> found;
  Status status = facts_.shared_memory->list(request.name(), found);
  for (const SharedRegionFacts& each : found) {
    auto& region = (*response.mutable_regions())[each.name];
    region.set_name(each.name);
    region.set_key(each.key);
    region.set_offset(each.offset);
    region.set_byte_size(each.byte_size);
  }
  return status;
}

Status KserveMetadata::answer(const inference::SystemSharedMemoryRegisterRequest& request,
                              inference::SystemSharedMemoryRegisterResponse& /*response*/) const {
  return facts_.shared_memory->add({.name = request.name(),
                                    .key = request.key(),
                                    .offset = request.offset(),
                                    .byte_size = request.byte_size()});
}

Status KserveMetadata::answer(const inference::SystemSharedMemoryUnregisterRequest& request,
                              inference::SystemSharedMemoryUnregisterResponse& /*response*/) const {
  if (request.name().empty()) {
    facts_.shared_memory->remove_all();
  } else {
    facts_.shared_memory->remove(request.name());
  }
  return {};
}

void KserveMetadata::begin(const inference::RepositoryModelLoadRequest& request,
                           RepositoryControl::Done done) const {
  if (const Status status = check_repository(request.repository_name()); !status.ok()) {
    done(status);
    return;
  }
  call_load(facts_.repository, request.model_name(), parameters_of(request), std::move(done));
}

void KserveMetadata::begin(const inference::RepositoryModelUnloadRequest& request,
                           RepositoryControl::Done done) const {
  if (const Status status = check_repository(request.repository_name()); !status.ok()) {
    done(status);
    return;
  }
  call_unload(facts_.repository, request.model_name(), parameters_of(request), std::move(done));
}

}  // namespace tessera
