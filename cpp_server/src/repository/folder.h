// What lies in a repository's folder: DIR/MODEL/VERSION/model.pt.
//
// Contract: free functions without state; any thread; they block on the file system. What is
// missing or cannot be read is left out and told in `remarks`, never thrown.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "repository/version.h"

namespace tessera {

// Which file a path leads to, as far as that shows without reading it. A file that was replaced by
// rename has another one; so has one that was written to in place, unless size and time are kept.
struct Fingerprint {
  std::uint64_t device = 0;
  std::uint64_t inode = 0;
  std::int64_t bytes = 0;
  std::int64_t modified_ns = 0;  // since 1970

  bool operator==(const Fingerprint&) const = default;
};

// The fingerprint of the file at `path`; all zero where there is none.
Fingerprint fingerprint_of(const std::string& path);

struct ModelFolder {
  std::string name;
  std::string path;
  std::map<Version, Fingerprint> versions;  // those that have a model.pt
  std::vector<std::string> remarks;         // one line for each name that cannot be used

  // Where the package of `version` lies.
  std::string package_path(Version version) const;

  // The folder of its commits.
  std::string log_path(Version version) const;
};

// The versions of the model in the folder `path`. Names that begin with a dot are passed over;
// so are serving.yaml and control.json. A folder of a version without model.pt has no remark: its
// file may be on its way.
ModelFolder scan_model(const std::string& path, const std::string& name);

struct RepositoryFolder {
  std::vector<ModelFolder> models;   // by name
  std::vector<std::string> remarks;  // of the folder itself: one line for each that cannot be used
};

// Every model in the folder `path`. A folder with neither a version nor a serving.yaml is a model
// without versions, which a later scan may find.
RepositoryFolder scan_repository(const std::string& path);

}  // namespace tessera
