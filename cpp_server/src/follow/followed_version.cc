#include "follow/followed_version.h"

#include <algorithm>
#include <exception>
#include <filesystem>
#include <new>
#include <system_error>
#include <utility>

#include "common/flags.h"
#include "common/stand_aside.h"
#include "common/text.h"
#include "follow/fence.h"

namespace tessera {
namespace {

// A commit for which there was no memory is tried again after so long, though its file is the same.
constexpr Duration kMemoryPatience = std::chrono::seconds(5);
// How long a version waits to be loaded again before it asks once more.
constexpr Duration kReloadPatience = std::chrono::seconds(30);

}  // namespace

std::set<CommitNumber> scan_log(const std::string& log) {
  std::set<CommitNumber> numbers;
  std::error_code error;
  for (std::filesystem::directory_iterator at(log, error), end; !error && at != end;
       at.increment(error)) {
    const auto number = parse_commit_name(at->path().filename().string());
    if (number.has_value()) numbers.insert(*number);
  }
  return numbers;
}

FollowedVersion::FollowedVersion(LogState state, std::string log_folder, const Model& model,
                                 Options options, UndoRecords& undo, const Clock& clock,
                                 const Log& log)
    : base_(std::move(state)),
      log_folder_(std::move(log_folder)),
      model_(model),
      options_(std::move(options)),
      undo_(undo),
      clock_(clock),
      log_(log),
      session_(model.runner.open_session(0)) {}

FollowedVersion::~FollowedVersion() { undo_.forget(this); }

LogState FollowedVersion::log_state() const {
  LogState state = base_;
  if (!applied_.empty()) {
    state.number = applied_.back().number;
    state.sha256 = applied_.back().sha256;
  }
  return state;
}

FollowedVersion::State FollowedVersion::state() const {
  const MutexLock lock(mutex_);
  State state{.number = log_state().number, .applied = {}};
  for (const Applied& commit : applied_) state.applied[commit.number] = commit.sha256;
  return state;
}

FollowedVersion::Outcome FollowedVersion::poll() {
  const MutexLock lock(mutex_);
  Fence fence;
  try {
    fence = read_fence(log_folder_);
  } catch (const UsageError& error) {
    refuse(log_state().number + 1, {"fenced", error.what()}, {});
    return Outcome::kIdle;
  }
  std::vector<CommitNumber> applied;
  for (const Applied& commit : applied_) applied.push_back(commit.number);
  const Step step = next_step(scan_log(log_folder_), fence, applied);
  switch (step.kind) {
    case Step::Kind::kWait:
      if (refused_.has_value()) settle();
      return Outcome::kIdle;
    case Step::Kind::kGap:
      refuse(step.number, {"gap", "is missing, and later ones are there"}, {});
      return Outcome::kIdle;
    case Step::Kind::kBack: return go_back(step.number);
    case Step::Kind::kTake: return take(step.number, fence);
  }
  return Outcome::kIdle;
}

FollowedVersion::Outcome FollowedVersion::take(CommitNumber number, const Fence& fence) {
  const Fingerprint file = fingerprint_of(text(log_folder_, "/", commit_name(number)));
  if (refused_before(number, file)) return Outcome::kIdle;
  Staged staged;
  Duration took{};
  try {
    stand_aside([&] {
      mutex_.assert_held();
      staged = stage(number, fence);
    });
    took = write(staged);
  } catch (const CommitError& error) {
    refuse(number, error.refusal(), file);
    return Outcome::kIdle;
  } catch (const std::bad_alloc&) {
    refuse(number, {"memory", "there is no memory for it"}, file);
    return Outcome::kIdle;
  }
  const CommitInfo& info = staged.commit.info;
  std::shared_ptr<StagedPatches> replaced = std::move(staged.patches);
  applied_.push_back({.number = number,
                      .sha256 = staged.commit.sha256,
                      .newest_example_s = info.newest_example_s,
                      .replaced = replaced});
  undo_.add(this, std::move(replaced));
  model_.metrics.apply.observe(seconds(took));
  model_.metrics.rows.fetch_add(info.rows(), std::memory_order_relaxed);
  settle();
  log_.info("commit", {{"model", base_.model},
                       {"version", std::to_string(base_.version)},
                       {"commit", number},
                       {"rows", static_cast<std::int64_t>(info.rows())},
                       {"seconds", seconds(took)}});
  return Outcome::kChanged;
}

FollowedVersion::Staged FollowedVersion::stage(CommitNumber number, const Fence& fence) const {
  const CommitFile file(text(log_folder_, "/", commit_name(number)), options_.trusted);
  if (const auto why = refusal(file.info(), file.sha256(), number, log_state(), fence)) {
    throw CommitError(why->reason, why->message);
  }
  const Weights& weights = *model_.runner.weights();
  Staged staged{.commit = file.read(weights), .patches = nullptr, .golden = {}};
  if (options_.verify_golden) {
    try {
      staged.golden.emplace(staged.commit.golden, model_.schema);
    } catch (const std::runtime_error& error) {
      throw CommitError("golden", error.what());
    }
  }
  staged.patches = model_.runner.weights()->stage(std::move(staged.commit.patches));
  return staged;
}

Duration FollowedVersion::write(Staged& staged) {
  session_->begin_thread(1);
  const ExclusiveHold hold(model_.commits.lock);
  const TimePoint begin = clock_.now();
  staged.patches->swap();
  try {
    replay(staged);
  } catch (const std::exception& error) {
    staged.patches->swap();
    throw CommitError("golden", error.what());
  }
  model_.commits.commit = staged.commit.info.number;
  return clock_.now() - begin;
}

// Throws std::exception where the model gives other answers, by either of its methods.
void FollowedVersion::replay(const Staged& staged) {
  if (!staged.golden.has_value()) return;
  const GoldenBounds bounds{.atol = staged.commit.info.golden_atol,
                            .rtol = staged.commit.info.golden_rtol};
  for (const bool shared : {false, true}) {
    if (shared && !model_.runner.shares_rows()) continue;
    staged.golden->replay(*session_, bounds, shared);
  }
}

FollowedVersion::Outcome FollowedVersion::go_back(CommitNumber to) {
  const auto keep = std::find_if(applied_.begin(), applied_.end(),
                                 [&](const Applied& commit) { return commit.number > to; });
  std::vector<std::shared_ptr<StagedPatches>> undo;
  for (auto commit = applied_.end(); commit != keep;) {
    --commit;
    undo.push_back(commit->replaced.lock());
    if (undo.back() != nullptr) continue;
    const TimePoint now = clock_.now();
    if (reload_asked_ != TimePoint::min() && now - reload_asked_ < kReloadPatience) {
      return Outcome::kIdle;
    }
    reload_asked_ = now;
    return Outcome::kReload;
  }
  const CommitNumber from = applied_.back().number;
  const TimePoint begin = clock_.now();
  {
    const ExclusiveHold hold(model_.commits.lock);
    for (const auto& patches : undo) patches->swap();
    model_.commits.commit = to;
  }
  for (const auto& patches : undo) undo_.forget(patches);
  applied_.erase(keep, applied_.end());
  settle();
  log_.info("rolled_back", {{"model", base_.model},
                            {"version", std::to_string(base_.version)},
                            {"commit", to},
                            {"from_commit", from},
                            {"seconds", seconds(clock_.now() - begin)}});
  return Outcome::kChanged;
}

bool FollowedVersion::refused_before(CommitNumber number, const Fingerprint& file) const {
  if (!refused_.has_value() || refused_->number != number || !(refused_->file == file)) {
    return false;
  }
  return refused_->reason != "memory" || clock_.now() - refused_->when < kMemoryPatience;
}

void FollowedVersion::refuse(CommitNumber number, const CommitRefusal& why,
                             const Fingerprint& file) {
  const bool told = refused_.has_value() && refused_->number == number &&
                    refused_->reason == why.reason && refused_->file == file;
  refused_ = Refused{.number = number, .reason = why.reason, .file = file, .when = clock_.now()};
  if (told) return;
  model_.metrics.count_refused(why.reason);
  trouble_ = text("commit ", number, ": ", why.message);
  show();
  log_.warning("commit_refused", {{"model", base_.model},
                                  {"version", std::to_string(base_.version)},
                                  {"commit", number},
                                  {"reason", why.reason},
                                  {"message", why.message}});
}

void FollowedVersion::settle() {
  refused_.reset();
  trouble_.clear();
  show();
}

void FollowedVersion::set_shown(bool shown) {
  const MutexLock lock(mutex_);
  shown_ = shown;
  show();
}

void FollowedVersion::show() {
  if (!shown_) return;
  model_.metrics.set_trouble(trouble_);
  model_.metrics.commit = log_state().number;
  model_.metrics.set_newest_example(applied_.empty() ? std::nullopt
                                                     : applied_.back().newest_example_s);
}

}  // namespace tessera
