// SHA-256 of a package's whole file, found behind what waits for the package. Nothing that serves
// needs it: what runs was compared with the manifest's hashes. It is what `sha256sum MODEL.pt`
// prints, for people who want to know which file this is.
//
// Contract: any thread may call; nothing but FileHash's destructor blocks, and that for
// milliseconds.
#pragma once

#include <cstddef>
#include <deque>
#include <functional>
#include <optional>
#include <stop_token>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/mutex.h"

namespace tessera {

class FileHash {
 public:
  // Gives the hash, lower-case hex; empty when it was asked to stop. May throw std::exception.
  using Compute = std::function<std::string(const std::stop_token&)>;

  // What came of it; one of the two is empty.
  struct Result {
    std::string sha256;   // lower-case hex
    std::string failure;  // why there is no hash
  };
  using Listener = std::function<void(const Result& result)>;

  // Calls `compute` once, in a thread of its own, while CPUs have nothing else to do
  // (idle_thread.h).
  explicit FileHash(Compute compute);
  FileHash(const FileHash&) = delete;
  FileHash& operator=(const FileHash&) = delete;

  // Lower-case hex; empty: not known yet, or not to be had.
  std::string known() const;

  // Calls `listener` once with the result: at once where there is one, else later in the hash's
  // thread, and no more once the destructor has returned.
  void tell(Listener listener);

 private:
  void run(const std::stop_token& stop, const Compute& compute);

  mutable Mutex mutex_;
  std::optional<Result> result_ TESSERA_GUARDED_BY(mutex_);
  std::vector<Listener> listeners_ TESSERA_GUARDED_BY(mutex_);
  std::jthread thread_;  // last: ends before what it uses
};

// Hashes of files that were loaded before, so that a file that comes again unchanged is not hashed
// again. What serves is compared with the manifest's hashes each time.
class FileHashes {
 public:
  // The hash of the file of that identity (PackageFile::identity); empty: it is not known.
  std::string of(const std::string& identity) const;

  void add(std::string identity, std::string sha256);

 private:
  mutable Mutex mutex_;
  // The newest last.
  std::deque<std::pair<std::string, std::string>> known_ TESSERA_GUARDED_BY(mutex_);
};

}  // namespace tessera
