// Which commits are in the folder of a log, without listing it at each look: whether the next one
// is there is asked for by its name, and only where it is not the folder is listed, which says
// whether it is missing. A folder of 100,000 commits takes some 200 ms to list; listings take no
// more than a hundredth of the time, so that in such a folder a missing commit is noticed some 20
// seconds later, and in one of a hundred at the next look. It is never noticed later than half a
// minute: a listing may have taken seconds because the machine or the storage stood still, which
// says nothing about the next one.
//
// Contract: one thread at a time; blocks on the file system.
#pragma once

#include <set>
#include <string>

#include "common/clock.h"
#include "follow/commit_chain.h"

namespace tessera {

class LogListing {
 public:
  // `clock` outlives it.
  LogListing(std::string folder, const Clock& clock);

  // `next` alone if it is there; else the numbers behind it that the last listing has found. Throws
  // UsageError where the folder cannot be read.
  std::set<CommitNumber> numbers_from(CommitNumber next);

 private:
  bool is_there(CommitNumber number) const;

  const std::string folder_;
  const Clock& clock_;
  std::set<CommitNumber> found_;  // by the last listing
  TimePoint due_ = TimePoint::min();
};

// The numbers of the commits in the folder `log`; none where there is no such folder. Throws
// UsageError where it cannot be read.
std::set<CommitNumber> scan_log(const std::string& log);

}  // namespace tessera
