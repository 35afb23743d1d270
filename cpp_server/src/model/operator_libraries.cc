#include "model/operator_libraries.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <dlfcn.h>

#include <cstdlib>
#include <map>
#include <sstream>
#include <string_view>

#include "common/text.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

constexpr const char* kInstall =
    "install it with: pip install 'tessera-rec[cpu]' (or 'tessera-rec[cuda]' for a GPU), or name "
    "its "
    "folder with --ops-dir";
constexpr const char* kBuild =
    "build it with: make build (or python kernels/build.py), or name its folder with --ops-dir";

struct Library {
  std::vector<std::string> operators;  // that loading it must register
  const char* remedy;                  // where it is missing
  bool needs_libtorch = false;         // see load_libtorch
};

// The libraries that a package may name.
const std::map<std::string, Library>& known_libraries() {
  static const std::map<std::string, Library> known = {
      {"fbgemm_gpu_tbe_inference",
       {.operators = {"fbgemm::int_nbit_split_embedding_codegen_lookup_function"},
        .remedy = kInstall,
        .needs_libtorch = true}},
      {"fbgemm_gpu_sparse_async_cumsum",
       {.operators = {"fbgemm::asynchronous_complete_cumsum"},
        .remedy = kInstall,
        .needs_libtorch = true}},
      {"tessera_ops",
       {.operators = {"tessera::lookup", "tessera::dot_interaction", "tessera::linear",
                      "tessera::linear_bf16"},
        .remedy = kBuild}},
  };
  return known;
}

std::string known_names() {
  std::string names;
  for (const auto& [name, library] : known_libraries()) {
    names += (names.empty() ? "" : ", ") + name;
  }
  return names;
}

fs::path find_library(const std::string& name, const std::vector<fs::path>& folders,
                      const char* remedy) {
  std::string searched;
  for (const fs::path& folder : folders) {
    for (const char* const prefix : {"", "lib"}) {
      const fs::path path = folder / (prefix + name + ".so");
      std::error_code ignored;
      if (fs::is_regular_file(path, ignored)) return path;
    }
    searched += (searched.empty() ? "" : ", ") + folder.string();
  }
  throw LibraryError(text("operator library '", name, "' was not found in ",
                          searched.empty() ? "any folder" : searched, "; ", remedy));
}

// LibTorch's folder, as the linker found it; empty where it cannot be told.
fs::path torch_folder() {
  Dl_info info{};
  if (dladdr(reinterpret_cast<const void*>(&c10::Dispatcher::realSingleton), &info) == 0 ||
      info.dli_fname == nullptr) {
    return {};
  }
  std::error_code failed;
  const fs::path library = fs::canonical(info.dli_fname, failed);
  return failed ? fs::path() : library.parent_path();
}

// FBGEMM's libraries depend on libtorch.so, which has no content and which this program does not
// link, and they search only their own folder for it. Once it is loaded, they find it by its name.
void load_libtorch() {
  const fs::path path = torch_folder() / "libtorch.so";
  std::error_code ignored;
  if (!fs::is_regular_file(path, ignored)) return;  // the library that needs it will say so
  if (dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL) == nullptr) {
    const char* const reason = dlerror();
    throw LibraryError(text(path.string(),
                            " does not load: ", reason == nullptr ? "unknown" : reason,
                            "; install torch again, the release that this server was built with"));
  }
}

// The file that this code is in: a program, or a shared library in somebody else's. Empty where it
// cannot be told.
fs::path own_file() {
  Dl_info info{};
  if (dladdr(reinterpret_cast<const void*>(&load_operator_libraries), &info) == 0 ||
      info.dli_fname == nullptr) {
    return {};
  }
  // A program's name is what it was called by, which need not be a path.
  const std::string_view name = info.dli_fname;
  std::error_code failed;
  const fs::path file = name.ends_with(".so") ? fs::canonical(info.dli_fname, failed)
                                              : fs::read_symlink("/proc/self/exe", failed);
  return failed ? fs::path() : file;
}

// The folders of the library where this code was built beside it: that of its own sanitizers, where
// it has some (build.sh), and CHECKOUT/build/cpp/PRESET/tessera-server -> CHECKOUT/kernels/lib,
// where kernels/build.py puts it. None elsewhere.
std::vector<fs::path> checkout_libraries() {
  const fs::path preset = own_file().parent_path();
  const fs::path cpp = preset.parent_path();
  if (cpp.filename() != "cpp" || cpp.parent_path().filename() != "build") return {};
  std::vector<fs::path> folders;
#if defined(TESSERA_SANITIZED)
  folders.push_back(preset / "lib");
#endif
  folders.push_back(cpp.parent_path().parent_path() / "kernels" / "lib");
  return folders;
}

}  // namespace

std::vector<fs::path> library_folders(const std::vector<std::string>& given) {
  std::vector<fs::path> folders(given.begin(), given.end());
  if (const char* const variable = std::getenv("TESSERA_OPS_DIR"); variable != nullptr) {
    std::istringstream parts(variable);
    for (std::string part; std::getline(parts, part, ':');) {
      if (!part.empty()) folders.emplace_back(part);
    }
  }
  for (const fs::path& built : checkout_libraries()) folders.push_back(built);
  // site-packages/torch/lib -> site-packages/fbgemm_gpu
  if (const fs::path torch = torch_folder(); !torch.empty()) {
    const fs::path packages = torch.parent_path().parent_path();
    folders.push_back(packages / "fbgemm_gpu");
    folders.push_back(packages / "tessera" / "kernels" / "lib");
  }
  return folders;
}

void load_operator_libraries(const std::vector<std::string>& names,
                             const std::vector<fs::path>& folders) {
  for (const std::string& name : names) {
    const auto known = known_libraries().find(name);
    if (known == known_libraries().end()) {
      throw LibraryError(
          text("operator library '", name, "' is unknown; known are: ", known_names()));
    }
    const char* const remedy = known->second.remedy;
    const fs::path path = find_library(name, folders, remedy);
    if (known->second.needs_libtorch) load_libtorch();
    // Global, because the libraries find each other's symbols that way.
    if (dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL) == nullptr) {
      const char* const reason = dlerror();
      throw LibraryError(text("operator library '", name, "' (", path.string(), ") does not load: ",
                              reason == nullptr ? "unknown" : reason, "; ", remedy));
    }
    for (const std::string& op : known->second.operators) {
      if (!c10::Dispatcher::singleton().findSchema({op, ""}).has_value()) {
        throw LibraryError(text("operator library '", name, "' (", path.string(),
                                ") does not register ", op, "; ", remedy));
      }
    }
  }
}

}  // namespace tessera
