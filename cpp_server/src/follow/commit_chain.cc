#include "follow/commit_chain.h"

#include <algorithm>
#include <array>

#include "common/text.h"
#include "package/format_rules.h"

namespace tessera {
namespace {

constexpr std::size_t kDigits = 8;
constexpr std::string_view kSuffix = ".commit";

bool is_fenced(const std::string& sha256, const Fence& fence) {
  return !sha256.empty() && std::any_of(fence.begin(), fence.end(), [&](const auto& fenced) {
    return fenced.second == sha256;
  });
}

}  // namespace

std::string commit_name(CommitNumber number) {
  const std::string digits = std::to_string(number);
  return std::string(kDigits - std::min(kDigits, digits.size()), '0') + digits +
         std::string(kSuffix);
}

std::optional<CommitNumber> parse_commit_name(std::string_view name) {
  if (name.size() != kDigits + kSuffix.size() || !name.ends_with(kSuffix)) return std::nullopt;
  CommitNumber number = 0;
  for (const char c : name.substr(0, kDigits)) {
    if (c < '0' || c > '9') return std::nullopt;
    number = 10 * number + (c - '0');
  }
  return number >= 1 && number <= kMaxCommitNumber ? std::optional(number) : std::nullopt;
}

CommitNumber number_after(CommitNumber state, const Fence& fence) {
  // Walking from number to number would take long where a name has a large one; the fence has few.
  CommitNumber number = state + 1;
  for (auto at = fence.upper_bound(state); at != fence.end() && at->first == number; ++at) {
    ++number;
  }
  return number;
}

Step next_step(const std::set<CommitNumber>& numbers, const Fence& fence,
               const std::vector<CommitNumber>& applied) {
  const auto fenced = std::find_if(applied.begin(), applied.end(),
                                   [&](CommitNumber number) { return fence.contains(number); });
  if (fenced != applied.end()) {
    return {Step::Kind::kBack, fenced == applied.begin() ? 0 : *std::prev(fenced)};
  }
  const CommitNumber state = applied.empty() ? 0 : applied.back();
  const auto next = std::find_if(numbers.upper_bound(state), numbers.end(),
                                 [&](CommitNumber number) { return !fence.contains(number); });
  if (next == numbers.end()) return {};
  // Numbers between that are not fenced are missing.
  const CommitNumber expected = number_after(state, fence);
  if (expected < *next) return {Step::Kind::kGap, expected};
  return {Step::Kind::kTake, *next};
}

std::optional<CommitRefusal> refusal(const CommitInfo& commit, const std::string& sha256,
                                     CommitNumber named, const LogState& state,
                                     const Fence& fence) {
  if (commit.model != state.model || commit.version != state.version) {
    return CommitRefusal{"base",
                         text("is for version ", commit.version, " of model '", commit.model,
                              "', not for version ", state.version, " of '", state.model, "'")};
  }
  if (commit.base != state.base) {
    return CommitRefusal{
        "base", text("is for the package ", commit.base, ", and this version's is ", state.base)};
  }
  if (commit.number != named) {
    return CommitRefusal{commit.number <= state.number ? "repeat" : "gap",
                         text("holds commit ", commit.number, ", expected ", named)};
  }
  if (is_fenced(sha256, fence)) {
    return CommitRefusal{"fenced", "was fenced off under another number"};
  }
  if (is_fenced(commit.previous, fence)) {
    return CommitRefusal{"fenced",
                         text("builds on the commit ", commit.previous, ", which was fenced off")};
  }
  if (commit.previous != state.sha256) {
    return CommitRefusal{"chain", text("builds on the commit ", commit.previous,
                                       ", and the one before is ", state.sha256)};
  }
  return std::nullopt;
}

}  // namespace tessera
