#include "repository/control_record.h"

#include <nlohmann/json.hpp>
#include <optional>

#include "common/flags.h"
#include "common/strict_json.h"
#include "common/text.h"
#include "repository/small_file.h"

namespace tessera {
namespace {

using Json = nlohmann::json;

constexpr int kFormat = 1;
constexpr int kMaxDepth = 3;

// What makes a file unreadable as a record, without the file's name.
[[noreturn]] void refuse(const std::string& what) { throw UsageError(what); }

std::string shown(const Json& value) {
  return value.dump(-1, ' ', true, Json::error_handler_t::replace);
}

std::optional<Version> version_in(const Json& value) {
  return value.is_number_integer() ? parse_version(value.dump()) : std::nullopt;
}

std::set<Version> read_versions(const std::string& key, const Json& list) {
  if (!list.is_array()) refuse(text(key, " is ", shown(list), "; give a list of versions"));
  std::set<Version> versions;
  for (const Json& item : list) {
    const auto version = version_in(item);
    if (!version)
      refuse(text(key, " has ", shown(item), "; give versions, positive whole numbers"));
    versions.insert(*version);
  }
  return versions;
}

Labels read_labels(const Json& json) {
  if (!json.is_object()) refuse(text("labels is ", shown(json), "; give an object"));
  Labels labels;
  for (const auto& [label, version] : json.items()) {
    if (!is_label(label)) refuse(text("labels has ", shown(Json(label)), "; give ", label_rule()));
    const auto number = version_in(version);
    if (!number) {
      refuse(text("labels.", label, " is ", shown(version),
                  "; give a version, a positive whole number"));
    }
    labels[label] = *number;
  }
  return labels;
}

ControlRecord read_record(const Json& json) {
  if (!json.is_object()) refuse("is not a JSON object; write it anew or remove it");
  ControlRecord record;
  for (const auto& [key, value] : json.items()) {
    if (key == "format") {
      if (!value.is_number_integer() || value != kFormat)
        refuse(text("format is ", shown(value), "; this server reads 1"));
    } else if (key == "unloaded") {
      if (!value.is_boolean()) refuse(text("unloaded is ", shown(value), "; give true or false"));
      record.unloaded = value.get<bool>();
    } else if (key == "add") {
      record.add = read_versions(key, value);
    } else if (key == "remove") {
      record.remove = read_versions(key, value);
    } else if (key == "labels") {
      record.labels = read_labels(value);
    } else {
      refuse(
          text("key is ", shown(Json(key)), "; give one of format, unloaded, add, remove, labels"));
    }
  }
  for (const Version version : record.add) {
    if (record.remove.contains(version)) {
      refuse(text("add and remove both have ", version, "; leave it in one of them"));
    }
  }
  return record;
}

std::string path_of(const std::string& model_folder) { return model_folder + "/control.json"; }

}  // namespace

ControlRecord parse_control_record(std::string_view json, const std::string& file) {
  try {
    return read_record(parse_strictly(json, kMaxDepth));
  } catch (const JsonError& error) {
    throw UsageError(text(file, ": is not JSON: ", error.what(), "; write it anew or remove it"));
  } catch (const UsageError& error) {
    throw UsageError(text(file, ": ", error.what()));
  }
}

std::string control_record_text(const ControlRecord& record) {
  const nlohmann::ordered_json json{
      {"format", kFormat},
      {"unloaded", record.unloaded},
      {"add", record.add},
      {"remove", record.remove},
      {"labels", std::map<std::string, Version>(record.labels.begin(), record.labels.end())}};
  return json.dump() + "\n";
}

ControlRecord read_control_record(const std::string& model_folder) {
  const std::string path = path_of(model_folder);
  const std::optional<std::string> json = read_small_file(path, kMaxControlRecordBytes);
  return json ? parse_control_record(*json, path) : ControlRecord{};
}

void write_control_record(const std::string& model_folder, const ControlRecord& record) {
  const std::string json = control_record_text(record);
  const std::string path = path_of(model_folder);
  if (json.size() > kMaxControlRecordBytes) {
    throw UsageError(text(path, ": the record would have ", json.size(), " bytes, the limit is ",
                          kMaxControlRecordBytes, "; unload versions or remove labels"));
  }
  replace_file(path, json);
}

}  // namespace tessera
