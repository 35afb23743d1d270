#include "package/verify.h"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <exception>
#include <thread>
#include <vector>

#include "common/mutex.h"
#include "common/text.h"
#include "package/package_error.h"
#include "package/sha256.h"

namespace tessera {
namespace {

constexpr unsigned kMaxThreads = 4;

std::string hash(const Records& records, const Record& record) {
  Sha256 digest;
  records.stream(record, [&](std::span<const std::byte> piece) { digest.update(piece); });
  return digest.hex();
}

void check_one(const Records& records, const std::string& name, const Record& record,
               const RecordInfo& expected) {
  const std::string found = hash(records, record);
  if (found != expected.sha256 || record.bytes != expected.bytes) {
    throw PackageError(
        records.file().path(),
        text("record '", name, "' was changed: SHA-256 ", found, " of ", record.bytes,
             " bytes, the manifest says ", expected.sha256, " of ", expected.bytes, " bytes"));
  }
}

void check_names(const Records& records, const Manifest& manifest) {
  for (const auto& [name, info] : manifest.records) {
    if (!records.has(name)) {
      throw PackageError(records.file().path(), text("records are missing: ", name));
    }
  }
  for (const auto& [name, record] : records.all()) {
    if (name == kManifestRecord) continue;
    const auto listed = manifest.records.find(name);
    if (listed == manifest.records.end()) {
      throw PackageError(records.file().path(),
                         text("records are not listed in the manifest: ", name));
    }
    if (listed->second.crc32 != record.crc32) {
      throw PackageError(records.file().path(),
                         text("the header of record '", name, "' was changed: CRC-32 ",
                              record.crc32, ", the manifest says ", listed->second.crc32));
    }
  }
}

}  // namespace

std::string verify_records(const Records& records, const Manifest& manifest) {
  check_names(records, manifest);
  // Index 0 is the whole file; then the records, the largest first, so that no thread is left
  // alone with a large one at the end.
  std::vector<std::string> names;
  for (const auto& [name, info] : manifest.records) names.push_back(name);
  std::sort(names.begin(), names.end(), [&](const std::string& a, const std::string& b) {
    return records.all().at(a).bytes > records.all().at(b).bytes;
  });
  std::string whole;
  std::atomic<std::size_t> next = 0;
  Mutex failure_mutex;
  std::exception_ptr failure;
  const auto work = [&] {
    try {
      for (std::size_t i = next++; i <= names.size(); i = next++) {
        if (i == 0) {
          const std::uint64_t bytes = records.file().size();
          whole = hash(records, {.offset = 0, .bytes = bytes});
        } else {
          const std::string& name = names[i - 1];
          check_one(records, name, records.all().at(name), manifest.records.at(name));
        }
      }
    } catch (...) {
      const MutexLock lock(failure_mutex);
      if (failure == nullptr) failure = std::current_exception();
    }
  };
  {
    std::vector<std::jthread> threads;
    const unsigned count = std::clamp(std::thread::hardware_concurrency(), 1U, kMaxThreads);
    for (unsigned i = 0; i < count; ++i) threads.emplace_back(work);
  }
  if (failure != nullptr) std::rethrow_exception(failure);
  return whole;
}

}  // namespace tessera
