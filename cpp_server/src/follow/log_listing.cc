#include "follow/log_listing.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <system_error>
#include <utility>

#include "common/flags.h"
#include "common/text.h"

namespace tessera {
namespace {

// Time between two listings, in times of what the last one has taken.
constexpr int kPauses = 99;
constexpr Duration kLongestPause = std::chrono::seconds(30);

}  // namespace

LogListing::LogListing(std::string folder, const Clock& clock)
    : folder_(std::move(folder)), clock_(clock) {}

std::set<CommitNumber> LogListing::numbers_from(CommitNumber next) {
  if (is_there(next)) return {next};
  const TimePoint begin = clock_.now();
  if (begin >= due_) {
    std::set<CommitNumber> found = scan_log(folder_);
    found.erase(found.begin(), found.lower_bound(next));
    found_ = std::move(found);
    const TimePoint end = clock_.now();
    due_ = end + std::min<Duration>(kPauses * (end - begin), kLongestPause);
  }
  return found_;
}

bool LogListing::is_there(CommitNumber number) const {
  const std::string name = commit_name(number);
  // The folder is opened at each look: a network file system then asks what has changed in it.
  const int folder = ::open(folder_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder < 0) return false;  // the listing says why
  struct stat about {};
  const bool there = ::fstatat(folder, name.c_str(), &about, AT_SYMLINK_NOFOLLOW) == 0;
  ::close(folder);
  return there;
}

std::set<CommitNumber> scan_log(const std::string& log) {
  std::set<CommitNumber> numbers;
  std::error_code error;
  if (!std::filesystem::is_directory(log, error)) return numbers;
  for (std::filesystem::directory_iterator at(log, error), end; !error && at != end;
       at.increment(error)) {
    const auto number = parse_commit_name(at->path().filename().string());
    if (number.has_value()) numbers.insert(*number);
  }
  if (error) throw UsageError(text(log, ": cannot be read (", error.message(), ")"));
  return numbers;
}

}  // namespace tessera
