#include "model/loader.h"

#include <stdexcept>

#include "common/text.h"
#include "model/golden.h"
#include "model/operator_libraries.h"
#include "model/torchscript_runner.h"
#include "package/package_error.h"
#include "package/records.h"
#include "package/verify.h"

namespace tessera {
namespace {

constexpr std::uint64_t kMaxGoldenBytes = 256ULL << 20;

std::string printed(MajorMinor version) { return text(version.first, ".", version.second); }

void check_torch(const std::string& path, const Manifest& manifest) {
  const MajorMinor running = major_minor(torch_version());
  if (running < manifest.torch_min || running >= manifest.torch_below) {
    throw PackageError(path, text("needs torch >=", printed(manifest.torch_min), ",<",
                                  printed(manifest.torch_below), ", running is ",
                                  torch_version(),
                                  "; build the server with a torch of that range or package "
                                  "the model again"));
  }
}

void check_device(Runner& runner, std::size_t device, const Manifest& manifest,
                  const Records& records, bool verify_golden) {
  const std::unique_ptr<Session> session = runner.open_session(device);
  session->begin_thread(1);
  // Both of the model's methods, where it has two.
  for (const bool shared : {false, true}) {
    if (shared && !runner.shares_rows()) continue;
    warm_up(*session, manifest.schema, shared);
    if (verify_golden) {
      replay_golden(*session, manifest, records.read(kGoldenRecord, kMaxGoldenBytes), shared);
    }
  }
}

void check_device_kind(const std::string& path, const Manifest& manifest) {
  if (manifest.device == "cpu" || manifest.device == "cuda") return;
  throw PackageError(path, text("was packaged for device '", manifest.device,
                                "'; this server runs packages for 'cpu' and 'cuda'"));
}

}  // namespace

LoadedPackage load_package(const std::string& path, const LoadOptions& options) {
  const TimePoint begin = std::chrono::steady_clock::now();
  const auto file = std::make_shared<const PackageFile>(path);
  const Records records(*file);
  LoadedPackage package;
  package.manifest = read_manifest(records);
  const Manifest& manifest = package.manifest;
  if (options.require_signature) {
    require_signature(path, read_manifest_bytes(records), options.trusted);
  }
  package.sha256 = verify_records(records, manifest);
  check_device_kind(path, manifest);
  check_torch(path, manifest);
  try {
    load_operator_libraries(manifest.operator_libraries, options.library_folders);
  } catch (const LibraryError& error) {
    throw PackageError(path, error.what());
  }
  std::unique_ptr<Runner> runner = manifest.device == "cpu"
                                       ? open_on_cpu(file, manifest)
                                       : open_on_gpus(file, manifest, options.gpu);
  file->check_unchanged();
  try {
    for (std::size_t device = 0; device < runner->devices().size(); ++device) {
      check_device(*runner, device, manifest, records, options.verify_golden);
    }
  } catch (const PackageError&) {
    throw;
  } catch (const std::exception& error) {
    const std::string message = error.what();
    throw PackageError(path, message.substr(0, message.find('\n')));
  }
  package.runner = std::move(runner);
  package.load_time = std::chrono::steady_clock::now() - begin;
  return package;
}

}  // namespace tessera
