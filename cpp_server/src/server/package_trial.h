// A package's own code, tried in a process of its own before it runs in the one that serves.
//
// What runs while a package is opened, warmed up and asked for its golden answers is the package's
// code, inside torch, where nobody can interrupt it. A loop without an end, or a crash, must not
// take the models with it that are being served. So this program is executed once more,
// without a copy of this process (a fork of one with threads and gigabytes would copy its page
// tables, and find locks of torch that no thread will ever release), and goes all the way with the
// same file: what code there is in it is compared with the manifest's hashes again, tables are
// mapped from the file, so that they take no memory of their own, and were compared by whoever
// asks. A process that takes too long is killed. Beside serving it is stopped and let go on in
// turns, so that it takes no more than its share of a CPU (pace.h) whatever it does.
//
// What has come back once is not tried again: a package is known by the hash of its manifest, which
// has the hash of every byte that can run.
//
// Contract: PackageTrials: one thread at a time; try_package blocks for as long as the trial takes;
// the process has the priority of the calling thread and ends with it.
#pragma once

#include <deque>
#include <functional>
#include <string>
#include <vector>

#include "package/package_file.h"
#include "server/config.h"

namespace tessera {

// The first argument of a process that tries a package; the second is the package's path, and flags
// follow.
inline constexpr const char* kTrialArgument = "--try-package";

class PackageTrials {
 public:
  // `config` must outlive this.
  explicit PackageTrials(const ServerConfig& config) : config_(config) {}

  // Returns where the code of the package in `file` has come back within --load-timeout-s, and
  // given the golden answers, now or before: `manifest_sha256` is that of its manifest, with which
  // every record has been compared. `answering` says whether calls are being answered, for which
  // the trial pauses; null: it does not pause. Pauses do not count. `waiting` is called every few
  // milliseconds; what it throws ends the trial. Throws PackageError naming the file and why it is
  // not served.
  void try_package(const PackageFile& file, const std::string& manifest_sha256,
                   const std::function<bool()>& answering, const std::function<void()>& waiting);

 private:
  const ServerConfig& config_;
  std::deque<std::string> passed_;  // the hashes of manifests, the newest last
};

// What such a process does, given its arguments from kTrialArgument on: its exit status. Why a
// package is not served is written to stderr.
int run_trial(const std::vector<std::string>& arguments);

}  // namespace tessera
