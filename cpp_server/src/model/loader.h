// From a package file to something that answers: check everything, then open, then warm up.
//
// The order is the safety: the file is read as a plain zip, its manifest understood, its signature
// checked where that is asked, names, sizes and checksums and then every record's hash compared,
// what would run at opening looked through, torch's version checked and the operator libraries
// loaded, and only then does torch open what was checked, and the graph's operators are looked at
// before it is called. Large tables that go to GPUs, which torch does not open, are compared on
// their way there: behind the opening, which says to which, and before the first call. A file that
// fails a check has run nothing.
//
// Contract: load_package blocks for as long as all this takes; one call at a time. Side
// effect: torch's fusion strategy for the process is set to no fusion.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "common/clock.h"
#include "model/runner.h"
#include "model/torchscript_runner.h"
#include "package/file_hash.h"
#include "package/format_rules.h"
#include "package/manifest.h"
#include "package/signature.h"
#include "package/table_memory.h"

namespace tessera {

struct LoadOptions {
  bool verify_golden = true;
  // With `require_signature`, one of these must have signed the package.
  bool require_signature = false;
  std::vector<PublicKey> trusted = {};
  std::vector<std::filesystem::path> library_folders = {};
  // What the package's own code may take while it is loaded, seconds; then this process ends. 0: no
  // limit, for who has seen to it by `before_opening`.
  double load_timeout_s = kDefaultLoadTimeoutS;
  // Operators that its graph may call beside those that every package may.
  std::set<std::string> allow_ops = {};
  GpuOptions gpu = {};
  // Other models are served meanwhile: few threads read and hash, while CPUs have nothing else to
  // do as long as that gets on.
  bool beside = false;
  // Whether calls are being answered, for which the hash of the whole file pauses; asked as long as
  // the package is there. Null: it pauses always.
  std::function<bool()> answering = nullptr;
  // The hashes of files that were loaded before; null: none is known.
  std::shared_ptr<FileHashes> file_hashes = nullptr;
  // Makes what a thread calls between pieces of the work, which may block. Null: the work goes on
  // at once.
  std::function<std::function<void()>()> pauses = nullptr;
  // Large tables are neither compared nor read into memory, but mapped: to see whether the model
  // can be opened and called, and not to serve it.
  bool only_try = false;
  // The version's commits are to be followed: its weights can change in place, so it shares none.
  bool follow = false;
  // Called with the share that is done, 0 to 1; what it throws ends the loading.
  std::function<void(double share)> progress = nullptr;
  // Called for a package for CPUs, with the hash of its manifest (`base_sha256` below), once every
  // byte has been compared and nothing has run yet. What it throws ends the loading.
  std::function<void(const PackageFile& file, const std::string& manifest_sha256)> before_opening =
      nullptr;
};

// What a package was loaded from that can be kept for when its version comes again
// (kept_packages.h).
struct PackageOrigin {
  std::string file;  // PackageFile::identity
  std::vector<std::shared_ptr<TableMemory>> tables;
  std::uint64_t other_bytes = 0;  // of the file's other records
};

// A package that has passed every check and is ready for its first request.
struct LoadedPackage {
  std::string path;
  Manifest manifest;
  std::string base_sha256;  // of the manifest's bytes with no signature in it, lower-case hex
  std::unique_ptr<Runner> runner;
  Duration load_time{0};
  std::vector<std::pair<std::string, Duration>> steps;  // that it consists of, in their order
  std::optional<PackageOrigin> origin;                  // nothing: it cannot be kept
  std::unique_ptr<FileHash> file_hash;                  // last: ends before what it reads
};

// Throws PackageError naming the file and why it is not served.
LoadedPackage load_package(const std::string& path, const LoadOptions& options);

}  // namespace tessera
