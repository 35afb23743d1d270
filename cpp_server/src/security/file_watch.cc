#include "security/file_watch.h"

#include <sys/stat.h>

#include <utility>

namespace tessera {

FileWatch::FileWatch(std::vector<std::string> paths) : paths_(std::move(paths)) { forget(); }

bool FileWatch::changed() {
  std::vector<Mark> now = marks();
  const bool settled = now == last_;
  last_ = std::move(now);
  if (!settled || last_ == known_) return false;
  known_ = last_;
  return true;
}

void FileWatch::forget() { known_ = last_ = marks(); }

std::vector<FileWatch::Mark> FileWatch::marks() const {
  constexpr std::int64_t kNsPerS = 1'000'000'000;
  std::vector<Mark> found;
  for (const std::string& path : paths_) {
    struct stat about {};
    if (::stat(path.c_str(), &about) != 0) {
      found.push_back({});
      continue;
    }
    found.push_back({static_cast<std::int64_t>(about.st_dev),
                     static_cast<std::int64_t>(about.st_ino), about.st_size,
                     about.st_mtim.tv_sec * kNsPerS + about.st_mtim.tv_nsec});
  }
  return found;
}

}  // namespace tessera
