// control.json of a model: what has been asked for by calls. It outlives the server.
//
// Contract: free functions without state; any thread; reading and writing block on the file system.
// One thread writes the record of a model. Throws UsageError, whose text is one line that names the
// file and what is wrong with it.
#pragma once

#include <set>
#include <string>
#include <string_view>

#include "repository/serving_config.h"
#include "repository/version.h"

namespace tessera {

inline constexpr std::size_t kMaxControlRecordBytes = 64 * 1024;

struct ControlRecord {
  bool unloaded = false;          // the whole model
  std::set<Version> add = {};     // wanted beside those that serving.yaml chooses
  std::set<Version> remove = {};  // not chosen
  Labels labels = {};             // win over serving.yaml's

  bool operator==(const ControlRecord&) const = default;
};

// Reads `json`, the content of `file` (which messages name). A field that is missing has its
// default; an unknown one, a version below 1, or one that is both added and removed is refused.
ControlRecord parse_control_record(std::string_view json, const std::string& file);

std::string control_record_text(const ControlRecord& record);

// The control.json in a model's folder; the default where there is none.
ControlRecord read_control_record(const std::string& model_folder);

// Puts `record` in its place as a whole: whoever reads the file, even after the power has failed,
// finds the old record or the new one. Throws UsageError where the folder cannot be written; the
// old record is in its place then.
void write_control_record(const std::string& model_folder, const ControlRecord& record);

}  // namespace tessera
