// A commit's file: read with every byte compared. Its layout is that of a package, with other
// records: commit.json last, which lists the others.
//
// Contract: free functions without state; any thread; they block on the disk.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "common/raw_bytes.h"
#include "follow/commit_chain.h"
#include "model/weights.h"
#include "package/commit.h"
#include "package/signature.h"

namespace tessera {

// A commit is not taken.
class CommitError : public std::runtime_error {
 public:
  // Whether the same file may be taken at another time.
  enum class Again { kNo, kYes };

  // `reason` is one of kCommitRefusals.
  CommitError(std::string reason, const std::string& message, Again again = Again::kNo)
      : std::runtime_error(message), refusal_{std::move(reason), message}, again_(again) {}

  const CommitRefusal& refusal() const { return refusal_; }
  Again again() const { return again_; }

 private:
  CommitRefusal refusal_;
  Again again_;
};

// A larger file is refused, for `memory`, before it is read.
inline constexpr std::uint64_t kMaxCommitBytes = std::uint64_t{4} << 30;

// A commit of which every byte is as it was written.
struct ReadCommit {
  CommitInfo info;
  std::string sha256;  // unsigned_sha256 of its commit.json
  RawBytes golden;
  std::vector<Patch> patches;  // in their order
};

class CommitFile {
 public:
  // Reads and checks commit.json of the file at `path`. `trusted`: the keys of which one must have
  // signed it; nothing: signatures are not looked at. Throws CommitError.
  CommitFile(const std::string& path, const std::optional<std::vector<PublicKey>>& trusted);

  const CommitInfo& info() const { return info_; }
  const std::string& sha256() const { return sha256_; }

  // Reads and compares all that is left, and sees whether it fits the records of `weights`.
  // `go_on` is called between pieces; what it throws ends the reading. Throws CommitError.
  ReadCommit read(const Weights& weights, const std::function<void()>& go_on) const;

 private:
  PackageFile file_;
  Records records_;
  CommitInfo info_;
  std::string sha256_;
};

// unsigned_sha256 of the commit.json of the file at `path`; nothing where it cannot be read.
std::optional<std::string> commit_sha256(const std::string& path);

}  // namespace tessera
