#include "model/kept_packages.h"

#include <chrono>
#include <new>
#include <system_error>
#include <utility>

#include "common/thread_name.h"
#include "package/package_error.h"
#include "package/package_file.h"

namespace tessera {
namespace {

std::string identity_of(const std::string& path) {
  try {
    return PackageFile(path).identity();
  } catch (const PackageError&) {  // the load will tell of it
    return "";
  }
}

}  // namespace

KeptPackages::KeptPackages(TableStore& store, Duration keep_for)
    : store_(store),
      kept_(
          keep_for, [] { name_thread("kept-packages"); },
          [](const LoadedPackage& package) {
            for (const auto& table : package.origin->tables) table->keep_no_more();
          }) {}

void KeptPackages::keep(LoadedPackage package) {
  const auto& origin = package.origin;
  if (!origin.has_value() || origin->other_bytes > kMostOtherBytes) return;
  try {
    if (package.file_hash->known().empty() || !store_.lend(origin->tables)) return;
    if (kept_.size() >= kMost) kept_.take();
    kept_.add(std::move(package));
  } catch (const std::bad_alloc&) {  // it is gone, as it would be without this
  } catch (const std::system_error&) {
  }
}

std::optional<LoadedPackage> KeptPackages::take(const std::string& path) {
  const TimePoint begin = std::chrono::steady_clock::now();
  const std::string file = identity_of(path);
  auto package = kept_.take([&](const LoadedPackage& kept) { return kept.origin->file == file; },
                            /*late=*/false);
  if (!package.has_value() || !store_.take_back(package->origin->tables)) return std::nullopt;
  package->path = path;
  package->load_time = std::chrono::steady_clock::now() - begin;
  package->steps = {{"take_back", package->load_time}};
  return package;
}

void KeptPackages::drop() {
  while (kept_.take().has_value()) {
  }
}

}  // namespace tessera
