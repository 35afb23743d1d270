#include "model/loader.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <optional>
#include <span>
#include <stdexcept>
#include <utility>

#include "common/cpus.h"
#include "common/pace.h"
#include "common/text.h"
#include "model/golden.h"
#include "model/opening.h"
#include "model/operator_libraries.h"
#include "model/time_limit.h"
#include "model/torchscript_runner.h"
#include "package/archive_rules.h"
#include "package/package_error.h"
#include "package/records.h"
#include "package/verify.h"

namespace tessera {
namespace {

constexpr unsigned kReadingThreads = 8;  // more than a disk or a memory can feed
constexpr unsigned kReadingThreadsBeside = 4;
constexpr int kCpusPerThreadBeside = 8;
// How far a load is once its parts are done.
constexpr double kReadingShare = 0.7;
constexpr double kTriedShare = 0.85;
constexpr double kOpenedShare = 0.9;

// How many threads read at most; beside serving one for so many CPUs, so that they do not have the
// memory and the caches to themselves.
unsigned reading_threads(bool beside) {
  if (!beside) return kReadingThreads;
  const auto share = static_cast<unsigned>(available_cpus() / kCpusPerThreadBeside);
  return std::clamp(share, 1U, kReadingThreadsBeside);
}

void tell(const LoadOptions& options, double share) {
  if (options.progress != nullptr) options.progress(share);
}

// What the checks have read of a file; kept for as long as its hash is computed.
struct Checked {
  explicit Checked(const std::string& path)
      : file(std::make_shared<const PackageFile>(path)),
        records(*file),
        manifest_bytes(read_manifest_bytes(records)),
        manifest(read_manifest(records, manifest_bytes)) {}

  std::shared_ptr<const PackageFile> file;
  Records records;
  std::vector<std::byte> manifest_bytes;
  Manifest manifest;
};

// How long each step took.
class LoadSteps {
 public:
  void done(const char* step) {
    const TimePoint now = std::chrono::steady_clock::now();
    steps_.emplace_back(step, now - last_);
    last_ = now;
  }

  Duration total() const { return last_ - begin_; }
  std::vector<std::pair<std::string, Duration>> all() const { return steps_; }

 private:
  const TimePoint begin_ = std::chrono::steady_clock::now();
  TimePoint last_ = begin_;
  std::vector<std::pair<std::string, Duration>> steps_;
};

std::string printed(MajorMinor version) { return text(version.first, ".", version.second); }

void check_torch(const std::string& path, const Manifest& manifest) {
  const MajorMinor running = major_minor(torch_version());
  if (running < manifest.torch_min || running >= manifest.torch_below) {
    throw PackageError(path, text("needs torch >=", printed(manifest.torch_min), ",<",
                                  printed(manifest.torch_below), ", running is ", torch_version(),
                                  "; build the server with a torch of that range or package "
                                  "the model again"));
  }
}

void check_device(Runner& runner, std::size_t device, const Manifest& manifest,
                  const std::optional<GoldenAnswers>& golden, const std::function<void()>& rest,
                  LoadSteps& steps) {
  const std::unique_ptr<Session> session = runner.open_session(device);
  session->begin_thread(1);
  // Both of the model's methods, where it has two.
  for (const bool shared : {false, true}) {
    if (shared && !runner.shares_rows()) continue;
    warm_up(*session, manifest.schema, shared, rest);
    steps.done("warm_up");
    if (golden.has_value()) {
      golden->replay(*session, {.atol = manifest.golden_atol, .rtol = manifest.golden_rtol},
                     shared);
    }
    steps.done("golden");
  }
}

void check_device_kind(const std::string& path, const Manifest& manifest) {
  if (manifest.device == "cpu" || manifest.device == "cuda") return;
  throw PackageError(path, text("was packaged for device '", manifest.device,
                                "'; this server runs packages for 'cpu' and 'cuda'"));
}

std::unique_ptr<FileHash> hash_of_file(const std::shared_ptr<const Checked>& checked,
                                       const Opening& opening, const LoadOptions& options) {
  // It has a part of the share of work aside: nobody waits for it, and loads go on beside it.
  constexpr double kShare = 0.25;
  Contents contents = opening.contents(/*unchanging=*/options.follow);
  contents[kManifestRecord] = checked->manifest_bytes;
  return std::make_unique<FileHash>([checked, contents, answering = options.answering,
                                     kept = opening.kept(),
                                     known = options.file_hashes](const std::stop_token& stop) {
    std::string sha256 = known != nullptr ? known->of(checked->file->identity()) : "";
    if (!sha256.empty()) return sha256;
    Pace pace(answering, CLOCK_THREAD_CPUTIME_ID, kShare);
    sha256 = file_sha256(checked->records, checked->manifest.records, contents, stop,
                         [&pace] { pace.rest(); });
    if (known != nullptr && !sha256.empty()) known->add(checked->file->identity(), sha256);
    return sha256;
  });
}

}  // namespace

LoadedPackage load_package(const std::string& path, const LoadOptions& options) {
  LoadSteps steps;
  const auto checked = std::make_shared<Checked>(path);
  const Manifest& manifest = checked->manifest;
  if (options.require_signature) {
    require_signature(path, checked->manifest_bytes, options.trusted);
  }
  check_device_kind(path, manifest);
  check_torch(path, manifest);
  const bool on_cpu = manifest.device == "cpu";
  verify_headers(checked->records, manifest.records);
  check_names(checked->records);
  const auto host = options.only_try ? Opening::Tables::kFile : Opening::Tables::kMemory;
  Opening opening(checked->records, manifest, options.allow_ops,
                  on_cpu ? host : Opening::Tables::kElsewhere,
                  options.follow ? Opening::Sharing::kNo : Opening::Sharing::kYes);
  steps.done("manifest");
  std::atomic<std::uint64_t> compared = 0;
  ReadOptions reading = {.threads = reading_threads(options.beside),
                         .when_idle = options.beside && !options.only_try,
                         .progress =
                             [&](std::uint64_t bytes) {
                               compared += bytes;
                               tell(options, kReadingShare * static_cast<double>(compared) /
                                                 static_cast<double>(checked->file->size()));
                             },
                         .pauses = options.pauses};
  GpuOptions gpu = options.gpu;
  gpu.changing = options.follow;
  gpu.reading = reading;
  reading.into = [&](const std::string& name, const Record& record) {
    return opening.place(name, record);
  };
  verify_records(checked->records, manifest.records, reading);
  opening.share_tables();
  steps.done("verify");
  LoadedPackage package;
  if (!options.only_try) package.file_hash = hash_of_file(checked, opening, options);
  try {
    load_operator_libraries(manifest.operator_libraries, options.library_folders);
  } catch (const LibraryError& error) {
    throw PackageError(path, error.what());
  }
  steps.done("operators");
  std::string sha256 = unsigned_sha256(checked->manifest_bytes);
  if (on_cpu && options.before_opening != nullptr) options.before_opening(*checked->file, sha256);
  if (on_cpu) tell(options, kTriedShare);
  std::optional<TimeLimit> limit;
  const bool limited = options.load_timeout_s > 0;
  if (on_cpu && limited) limit.emplace(path, options.load_timeout_s);
  const std::function<void()> rest = options.pauses != nullptr ? options.pauses() : nullptr;
  if (gpu.rest == nullptr) gpu.rest = rest;
  std::unique_ptr<Runner> runner = on_cpu ? open_on_cpu(opening, path, manifest, options.follow)
                                          : open_on_gpus(opening, path, manifest, gpu);
  steps.done("open");
  // Opening has read large tables.
  if (!on_cpu && limited) limit.emplace(path, options.load_timeout_s);
  tell(options, kOpenedShare);
  std::span<const std::byte> golden;
  if (options.verify_golden) {
    golden = opening.content(kGoldenRecord);
    if (golden.empty())
      throw PackageError(path, text("record '", kGoldenRecord, "' is missing or empty"));
  }
  try {
    std::optional<GoldenAnswers> answers;
    if (!golden.empty()) answers.emplace(golden, manifest.schema);
    for (std::size_t device = 0; device < runner->devices().size(); ++device) {
      check_device(*runner, device, manifest, answers, rest, steps);
    }
  } catch (const PackageError&) {
    throw;
  } catch (const std::exception& error) {
    throw PackageError(path, one_line(error.what()));
  }
  package.path = path;
  package.manifest = manifest;
  package.base_sha256 = std::move(sha256);
  package.runner = std::move(runner);
  package.load_time = steps.total();
  package.steps = steps.all();
  if (on_cpu && !options.only_try && !options.follow) {
    package.origin = {.file = checked->file->identity(),
                      .tables = opening.tables_in_memory(),
                      .other_bytes = opening.other_bytes()};
  }
  return package;
}

}  // namespace tessera
