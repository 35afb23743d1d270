// libFuzzer target: what is read of a package before anything of it is trusted. Whatever the bytes
// are, each reader must end in what it reads or in its own refusal. The first byte says which
// reader; seeds are that byte and a manifest.json, a data.pkl, a golden.bin, a source or a whole
// package.
//
//   cpp_server/build.sh fuzz && build/cpp/fuzz/tests/fuzz_package -max_total_time=600 SEEDS
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/text.h"
#include "package/manifest.h"
#include "package/package_error.h"
#include "package/package_file.h"
#include "package/records.h"
#include "package/safetensors.h"
#include "package/scripted_source.h"
#include "package/storages.h"
#include "package/verify.h"

namespace {

using namespace tessera;
using Content = std::vector<std::byte>;

void require(bool holds) {
  if (!holds) std::abort();
}

void read_pickle(std::span<const std::byte> content) {
  const Storages storages(content);
  for (int key = 0; key < 10; ++key) {
    const std::string name = std::to_string(key);
    if (storages.plain(name)) require(Storages(storages.with_sizes({{name, 24}})).plain(name));
  }
}

void read_tensors(std::span<const std::byte> content) {
  for (const auto& [name, tensor] : read_safetensors(content)) {
    require(tensor.bytes.empty() ||
            (tensor.bytes.data() >= content.data() && &tensor.bytes.back() <= &content.back()));
  }
}

void read_package(std::span<const std::byte> content) {
  static const int descriptor = ::memfd_create("package", MFD_CLOEXEC);
  require(descriptor >= 0 && ::ftruncate(descriptor, 0) == 0);
  require(::pwrite(descriptor, content.data(), content.size(), 0) ==
          static_cast<ssize_t>(content.size()));
  const PackageFile file(text("/proc/self/fd/", descriptor));
  const Records records(file);
  std::map<std::string, Content> kept;
  const auto into = [&](const std::string& name, const Record& record) -> Destination {
    return {.place = kept.emplace(name, Content(record.bytes)).first->second};
  };
  verify_records(records, read_manifest(records).records, {.into = into});
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  // In memory of exactly its size.
  const auto* const begin = reinterpret_cast<const std::byte*>(data);
  const Content content(begin + 1, begin + size);
  try {
    switch (data[0] % 5) {
      case 0: parse_manifest(content); break;
      case 1: read_pickle(content); break;
      case 2: read_tensors(content); break;
      case 3: check_source(content, {}); break;
      default: read_package(content);
    }
  } catch (const std::invalid_argument&) {
  } catch (const PackageError&) {
  }
  return 0;
}
