#include "front/repository_calls.h"

#include <optional>
#include <utility>
#include <vector>

#include "common/nearest.h"
#include "common/text.h"

namespace tessera {
namespace {

// Triton's; no model here depends on another.
constexpr const char* kUnloadDependents = "unload_dependents";

Status wrong_value(const std::string& name, const Parameter& value, const std::string& expected) {
  std::string shown = "neither text nor a whole number";
  if (const auto* text = std::get_if<std::string>(&value)) shown = "'" + *text + "'";
  if (const auto* number = std::get_if<std::int64_t>(&value)) shown = std::to_string(*number);
  return Status::invalid(text("parameter '", name, "' is ", shown, ", expected ", expected));
}

Status read_version(const std::string& name, const Parameter& value,
                    std::optional<Version>& version) {
  const auto* const text = std::get_if<std::string>(&value);
  const auto* const number = std::get_if<std::int64_t>(&value);
  if (text != nullptr) version = parse_version(*text);
  if (number != nullptr && *number >= 1) version = *number;
  return version ? Status{} : wrong_value(name, value, "a version, a positive whole number");
}

// "previous", a version, or a version's state such as "3.42".
Status read_rollback(const std::string& name, const Parameter& value, Rollback& rollback) {
  const auto* const text = std::get_if<std::string>(&value);
  if (text != nullptr && *text == "previous") return {};
  Parameter version = value;
  if (const auto point = text == nullptr ? std::string::npos : text->find('.');
      point != std::string::npos) {
    version = text->substr(0, point);
    const std::string commit = text->substr(point + 1);
    rollback.commit = commit == "0" ? 0 : parse_version(commit);
    if (!rollback.commit.has_value()) version = OtherParameter{};
  }
  if (read_version(name, version, rollback.version).ok()) return {};
  return wrong_value(name, value, "'previous', a version, or a state such as '3.42'");
}

Status unknown_parameter(const std::string& name, const std::vector<std::string>& known) {
  std::string all;
  for (const std::string& one : known) all += (all.empty() ? "'" : ", '") + one + "'";
  const std::string near = nearest(name, known);
  return Status::invalid(text("parameter '", name, "' is unknown, expected ", all,
                              near.empty() ? "" : "; did you mean '" + near + "'?"));
}

Status read_load(const Parameters& parameters, LoadRequest& request) {
  for (const auto& [name, value] : parameters) {
    Status status;
    const auto* const text = std::get_if<std::string>(&value);
    if (name == "version") {
      status = read_version(name, value, request.version);
    } else if (name == "label") {
      if (text == nullptr || !is_label(*text)) return wrong_value(name, value, label_rule());
      request.label = *text;
    } else if (name == "rollback") {
      request.rollback.emplace();
      status = read_rollback(name, value, *request.rollback);
    } else {
      status = unknown_parameter(name, {"version", "label", "rollback"});
    }
    if (!status.ok()) return status;
  }
  return {};
}

Status read_unload(const Parameters& parameters, std::optional<Version>& version) {
  for (const auto& [name, value] : parameters) {
    if (name == kUnloadDependents) continue;
    Status status = name == "version" ? read_version(name, value, version)
                                      : unknown_parameter(name, {"version"});
    if (!status.ok()) return status;
  }
  return {};
}

// Whether calls may change anything.
Status check_allowed(const RepositoryControl* control) {
  if (control == nullptr) {
    return {Code::kFailedPrecondition,
            "this server has no repository; calls may load and unload with --model-repository DIR "
            "and --model-control explicit"};
  }
  if (control->control() == ModelControl::kExplicit) return {};
  return {Code::kFailedPrecondition,
          text("--model-control is ", control_name(control->control()),
               "; calls may load and unload with --model-control explicit")};
}

}  // namespace

std::vector<IndexEntry> index_entries(const ServerFacts& facts) {
  if (facts.repository != nullptr) return facts.repository->index();
  std::vector<IndexEntry> entries;
  for (const std::string& name : facts.registry.names()) {
    Status status;
    const auto model = facts.registry.find(name, "", status);
    IndexEntry entry{.model = name, .state = VersionState::kLoading};
    if (model != nullptr) {
      entry.version = model->version();
      entry.state = VersionState::kReady;
    }
    entries.push_back(std::move(entry));
  }
  return entries;
}

void call_load(RepositoryControl* control, const std::string& model, const Parameters& parameters,
               RepositoryControl::Done done) {
  Status status = check_allowed(control);
  LoadRequest request;
  if (status.ok()) status = read_load(parameters, request);
  if (!status.ok()) {
    done(status);
    return;
  }
  control->load(model, request, std::move(done));
}

void call_unload(RepositoryControl* control, const std::string& model, const Parameters& parameters,
                 RepositoryControl::Done done) {
  Status status = check_allowed(control);
  std::optional<Version> version;
  if (status.ok()) status = read_unload(parameters, version);
  if (!status.ok()) {
    done(status);
    return;
  }
  control->unload(model, version, std::move(done));
}

}  // namespace tessera
