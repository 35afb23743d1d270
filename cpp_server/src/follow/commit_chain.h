// Which commit of a version's log comes next: pure functions of the folder's names, the fence and
// the state.
//
// Commits are numbered from 1 on. The state of a version is the list of commits that it has taken.
// Numbers in the fence are passed over as if they had never been; every other number below one that
// is there must be there, too. tests/commits/cases.json holds both servers to the same cases.
//
// Contract: no state, any thread, nothing blocks.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "package/commit.h"

namespace tessera {

// The folder of a version's commits, beside its model.pt.
inline constexpr const char* kLogFolder = "log";

using CommitNumber = std::int64_t;  // 1 to kMaxCommitNumber; 0 stands for the package itself

// "00000042.commit"
std::string commit_name(CommitNumber number);

// The number of the commit that a file of this name holds; nothing: it holds none.
std::optional<CommitNumber> parse_commit_name(std::string_view name);

// The commits that nobody may take again: by number the hash of their commit.json without its
// signature; empty: it could not be read.
using Fence = std::map<CommitNumber, std::string>;

// What a follower of the log does next.
struct Step {
  enum class Kind {
    kWait,  // nothing new is there
    kTake,  // read commit `number`, and take it if `refusal` has nothing against it
    kBack,  // go back to the state after commit `number`: a later one was fenced
    kGap,   // commit `number` is missing, and later ones are there
  };
  Kind kind = Kind::kWait;
  CommitNumber number = 0;

  bool operator==(const Step&) const = default;
};

// The first number behind `state` that is not fenced: that of the commit which comes next.
CommitNumber number_after(CommitNumber state, const Fence& fence);

// `numbers` are those of the files that are there, `applied` those of the commits that the state is
// made of, ascending.
Step next_step(const std::set<CommitNumber>& numbers, const Fence& fence,
               const std::vector<CommitNumber>& applied);

// Where a version stands.
struct LogState {
  std::string model = {};
  std::int64_t version = 0;
  std::string base = {};    // unsigned_sha256 of its package's manifest
  CommitNumber number = 0;  // of the last commit that it has taken
  std::string sha256 =
      {};  // unsigned_sha256 of that commit's commit.json; where there is none, base
};

// Why a commit is not taken: the word, one of kCommitRefusals, and the words for people.
struct CommitRefusal {
  std::string reason;
  std::string message;

  bool operator==(const CommitRefusal&) const = default;
};

// Why `commit`, from the file of the number `named`, is not the next one; nothing: it is. `sha256`
// is the unsigned_sha256 of its commit.json.
std::optional<CommitRefusal> refusal(const CommitInfo& commit, const std::string& sha256,
                                     CommitNumber named, const LogState& state, const Fence& fence);

}  // namespace tessera
