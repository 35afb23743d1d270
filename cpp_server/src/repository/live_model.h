// One model of a repository while the server runs: its folder and settings as they were last read,
// where each of its versions stands, and those that answer.
//
// Contract: used by one thread, the manager's; read blocks on the file system.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "model/served_model.h"
#include "repository/changes.h"
#include "repository/control_record.h"
#include "repository/folder.h"
#include "repository/routes.h"
#include "repository/serving_config.h"
#include "repository/wanted.h"

namespace tessera {

class LiveModel {
 public:
  using Served = std::map<Version, std::shared_ptr<ServedModel>>;

  explicit LiveModel(ModelFolder its_folder) : folder(std::move(its_folder)) {}

  struct Reading {
    bool changed = false;               // anything that requests or the index can see
    std::vector<std::string> troubles;  // why a file cannot be read, one line each
  };

  // Reads serving.yaml and control.json of `found`, and what is wanted now. What cannot be read
  // stays as it was.
  Reading read(ModelFolder found);

  // Nothing is wanted any more: the folder is not there.
  void lose_folder();

  // `changed` is what calls have asked for from now on.
  void set_record(ControlRecord changed);

  // The server's limits with those of this model's serving.yaml in their place.
  ServerConfig limited(const ServerConfig& config) const;

  ModelSituation situation() const;

  // Which version answers what.
  Routes routes() const;

  // Every version that is in the folder, wanted, or loaded; one entry without a version where there
  // is none.
  std::vector<IndexEntry> index() const;

  const std::string& name() const { return folder.name; }

  // Why serving.yaml or control.json cannot be read; empty: they can.
  const std::string& trouble() const { return trouble_; }

  // The versions that answer.
  std::set<Version> ready_versions() const;

  // Whether `version` is loaded, or on its way in or out.
  bool holds(Version version) const;
  bool holds_any() const;

  ModelFolder folder;
  Wanted wanted;
  VersionStates states;
  std::map<Version, std::string> reasons;  // why a load failed
  Served ready;
  std::optional<bool> told_serving;  // what the manager's listener was told last

 private:
  std::set<Version> present() const;
  void forget_absent();

  // Finds what is wanted, of what was read.
  void decide();

  std::optional<ServingConfig> config_;  // nothing: none could be read yet
  std::optional<ControlRecord> record_;  // likewise
  std::string trouble_;                  // why files cannot be read
};

}  // namespace tessera
