#include "repository/folder.h"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <optional>

#include "common/text.h"
#include "follow/commit_chain.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kNsPerSecond = 1'000'000'000;

std::optional<Fingerprint> fingerprint(const struct stat& about) {
  if (!S_ISREG(about.st_mode)) return std::nullopt;
  return Fingerprint{.device = about.st_dev,
                     .inode = about.st_ino,
                     .bytes = about.st_size,
                     .modified_ns = about.st_mtim.tv_sec * kNsPerSecond + about.st_mtim.tv_nsec};
}

// The names of the folders in `path`, sorted, without those that begin with a dot.
std::vector<std::string> folders_in(const std::string& path, std::vector<std::string>& remarks) {
  std::vector<std::string> names;
  std::error_code error;
  for (fs::directory_iterator at(path, error), end; !error && at != end; at.increment(error)) {
    std::string name = at->path().filename().string();
    std::error_code unknown;
    if (!name.starts_with('.') && at->is_directory(unknown)) names.push_back(std::move(name));
  }
  if (error) remarks.push_back(text(path, ": cannot be read (", error.message(), ")"));
  std::sort(names.begin(), names.end());
  return names;
}

// `name` as a line of a log can show it.
std::string shown(const std::string& name) {
  std::string clean = name;
  std::replace_if(
      clean.begin(), clean.end(), [](char c) { return c < ' ' || c > '~'; }, '?');
  return clean;
}

}  // namespace

Fingerprint fingerprint_of(const std::string& path) {
  struct stat about {};
  if (::stat(path.c_str(), &about) != 0) return {};
  return fingerprint(about).value_or(Fingerprint{});
}

std::string ModelFolder::package_path(Version version) const {
  return text(path, "/", version, "/model.pt");
}

std::string ModelFolder::log_path(Version version) const {
  return text(path, "/", version, "/", kLogFolder);
}

ModelFolder scan_model(const std::string& path, const std::string& name) {
  ModelFolder model{.name = name, .path = path, .versions = {}, .remarks = {}};
  for (const std::string& folder : folders_in(path, model.remarks)) {
    const std::optional<Version> version = parse_version(folder);
    if (!version) {
      model.remarks.push_back(text(path, "/", shown(folder), ": '", shown(folder),
                                   "' is not a version; give the folder a positive number without "
                                   "leading zeros, or a name that begins with a dot"));
      continue;
    }
    struct stat about {};
    const std::string package = model.package_path(*version);
    if (::stat(package.c_str(), &about) != 0) {
      if (errno != ENOENT) {
        model.remarks.push_back(text(package, ": cannot be read (", std::strerror(errno), ")"));
      }
    } else if (const auto file = fingerprint(about)) {
      model.versions.emplace(*version, *file);
    } else {
      model.remarks.push_back(package + ": is not a regular file");
    }
  }
  return model;
}

RepositoryFolder scan_repository(const std::string& path) {
  RepositoryFolder repository;
  for (const std::string& name : folders_in(path, repository.remarks)) {
    const std::string folder = text(path, "/", name);
    if (is_model_name(name)) {
      repository.models.push_back(scan_model(folder, name));
    } else {
      repository.remarks.push_back(text(
          path, "/", shown(name), ": '", shown(name),
          "' is not a model's name; give the folder letters, digits, '_', '-' and '.', at most ",
          kMaxModelNameBytes, " of them"));
    }
  }
  return repository;
}

}  // namespace tessera
