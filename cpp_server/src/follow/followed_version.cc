#include "follow/followed_version.h"

#include <sys/stat.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <new>
#include <utility>

#include "common/flags.h"
#include "common/out_of_memory.h"
#include "common/pace.h"
#include "common/stand_aside.h"
#include "common/text.h"
#include "csrc/idle_thread.h"
#include "follow/fence.h"

namespace tessera {
namespace {

// A commit for which there was no memory, or whose file could not be read, is tried again after so
// long, though its file is the same.
constexpr Duration kAgainPatience = std::chrono::seconds(5);
// How long a version waits to be loaded again before it asks once more.
constexpr Duration kReloadPatience = std::chrono::seconds(30);

// A commit is read and staged with pauses until its file has had its name for so long: one that is
// late is not made later.
constexpr Duration kStagingPauses = std::chrono::milliseconds(500);
// Then what the swap has left is done with pauses until it has had its name for so long: the next
// commit waits for the end of that.
constexpr Duration kFinishingPauses = std::chrono::milliseconds(750);
// Of a CPU, and over how long, what is too little to stage a commit while CPUs have nothing else to
// do.
constexpr Patience kIdlePatience{.share = 0.02, .length = std::chrono::milliseconds(100)};

// What is left of `most` for the file at `path`. A clock that was wrong when the file got its name
// makes it none, or all.
Duration pauses_left(const std::string& path, Duration most) {
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0) return Duration::zero();
  const auto named = std::chrono::seconds(status.st_ctim.tv_sec) +
                     std::chrono::nanoseconds(status.st_ctim.tv_nsec);
  const auto age = std::chrono::system_clock::now().time_since_epoch() - named;
  return std::clamp<Duration>(most - age, Duration::zero(), most);
}

}  // namespace

class FollowedVersion::Urgent {
 public:
  explicit Urgent(const FollowedVersion& version) : waiting_(version.urgent_) { ++waiting_; }
  ~Urgent() { --waiting_; }
  Urgent(const Urgent&) = delete;
  Urgent& operator=(const Urgent&) = delete;

 private:
  std::atomic<int>& waiting_;
};

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
      session_(model.runner.open_session(0)),
      listing_(log_folder_, clock) {}

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
  const Urgent urgent(*this);
  const MutexLock lock(mutex_);
  State state{.number = log_state().number, .applied = {}};
  for (const Applied& commit : applied_) state.applied[commit.number] = commit.sha256;
  return state;
}

FollowedVersion::Outcome FollowedVersion::poll() {
  const MutexLock lock(mutex_);
  try {
    return step();
  } catch (const UsageError& error) {
    refuse(log_state().number + 1, {"fenced", error.what()}, {});
    return Outcome::kIdle;
  }
}

Step FollowedVersion::next(const Fence& fence, const std::set<CommitNumber>& numbers) const {
  std::vector<CommitNumber> applied;
  applied.reserve(applied_.size());
  for (const Applied& commit : applied_) applied.push_back(commit.number);
  return next_step(numbers, fence, applied);
}

// Throws UsageError where the fence cannot be read.
FollowedVersion::Outcome FollowedVersion::step() {
  const Fence fence = read_fence(log_folder_);
  Step step = next(fence, {});
  if (step.kind == Step::Kind::kWait) {  // nothing is to be taken back
    const CommitNumber state = log_state().number;
    try {
      step = next(fence, listing_.numbers_from(number_after(state, fence)));
    } catch (const UsageError& error) {
      refuse(state + 1, {"damaged", error.what()}, {});
      return Outcome::kIdle;
    }
  }
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
  std::uint64_t rows = 0;
  Duration took{};
  try {
    staged = stage_aside(number, fence);
    // Reading may have taken long, and somebody may have fenced it off meanwhile.
    if (read_fence(log_folder_) != fence) return Outcome::kChanged;
    rows = staged.commit.info.rows();
    Applied applied{.number = number,
                    .sha256 = staged.commit.sha256,
                    .newest_example_s = staged.commit.info.newest_example_s,
                    .replaced = staged.patches};
    if (applied_.size() == applied_.capacity()) applied_.reserve(2 * applied_.size() + 8);
    took = write(staged);
    applied_.push_back(std::move(applied));  // there is room for it
  } catch (const LeftForLater&) {
    return Outcome::kIdle;
  } catch (const CommitError& error) {
    refuse(number, error.refusal(), file, error.again() == CommitError::Again::kYes);
    return Outcome::kIdle;
  } catch (const std::bad_alloc&) {
    refuse(number, {"memory", "there is no memory for it"}, file, /*again=*/true);
    return Outcome::kIdle;
  }
  finish(*staged.patches,
         pauses_left(text(log_folder_, "/", commit_name(number)), kFinishingPauses));
  model_.metrics.apply.observe(seconds(took));
  model_.metrics.rows.fetch_add(rows, std::memory_order_relaxed);
  settle();
  undo_.add(this, std::move(staged.patches));
  log_.info("commit", {{"model", base_.model},
                       {"version", std::to_string(base_.version)},
                       {"commit", number},
                       {"rows", static_cast<std::int64_t>(rows)},
                       {"seconds", seconds(took)}});
  return Outcome::kChanged;
}

// Throws LeftForLater and Starved.
void FollowedVersion::go_on(const std::stop_token& starved) const {
  if (starved.stop_requested()) throw Starved();
  if (urgent_ > 0 || (options_.stopping != nullptr && options_.stopping())) throw LeftForLater();
}

FollowedVersion::Staged FollowedVersion::stage_aside(CommitNumber number,
                                                     const Fence& fence) const {
  std::optional<Staged> staged;
  const auto work = [&](const std::stop_token& starved) {
    mutex_.assert_held();
    if (staged.has_value()) return;
    try {
      staged = stage(number, fence, starved);
    } catch (const Starved&) {  // it is begun again, on a thread that gets on
      return;
    }
  };
  stand_aside([&] {
    const auto gets_on = options_.idle_thread_gets_on != nullptr ? options_.idle_thread_gets_on
                                                                 : idle_thread_gets_on;
    if (model_.runner.weights()->on_host() && gets_on()) {
      run_on_idle_thread(work, kIdlePatience);
    } else {
      work({});
    }
  });
  return std::move(*staged);
}

FollowedVersion::Staged FollowedVersion::stage(CommitNumber number, const Fence& fence,
                                               const std::stop_token& starved) const {
  const std::string path = text(log_folder_, "/", commit_name(number));
  const CommitFile file(path, options_.trusted);
  if (const auto why = refusal(file.info(), file.sha256(), number, log_state(), fence)) {
    throw CommitError(why->reason, why->message);
  }
  const Weights& weights = *model_.runner.weights();
  Pace pace;
  // Before it answers there is nobody to make room for.
  const TimePoint until =
      clock_.now() + (shown_ ? pauses_left(path, kStagingPauses) : Duration::zero());
  const std::function<void()> between = [&] {
    go_on(starved);
    if (clock_.now() < until) pace.rest();
  };
  Staged staged{.commit = file.read(weights, between), .patches = nullptr, .golden = {}};
  if (options_.verify_golden) {
    try {
      staged.golden.emplace(staged.commit.golden, model_.schema);
    } catch (const std::runtime_error& error) {
      throw CommitError("golden", error.what());
    }
  }
  staged.patches = model_.runner.weights()->stage(
      std::move(staged.commit.patches),
      shown_ ? Weights::Beside::kBatches : Weights::Beside::kNothing, between);
  staged.patches->prepare(between);
  return staged;
}

Duration FollowedVersion::write(Staged& staged) {
  session_->begin_thread(1);
  // While it was staged the rows were kept at the pace of a thread that stands back, and others may
  // have taken their room in the caches since.
  staged.patches->fetch();
  const ExclusiveHold hold(model_.commits.lock);
  const TimePoint begin = clock_.now();
  staged.patches->swap();
  try {
    replay(staged);
  } catch (const std::exception& error) {
    staged.patches->swap();
    if (out_of_memory(error)) throw std::bad_alloc();
    throw CommitError("golden", one_line(error.what()));
  }
  model_.commits.commit = staged.commit.info.number;
  return clock_.now() - begin;
}

void FollowedVersion::finish(StagedPatches& patches, Duration pauses) {
  if (patches.unfinished()) {
    // The next commit, and who wants to take this one back, wait for the end.
    const TimePoint until = clock_.now() + pauses;
    stand_aside([&] {
      Pace pace;
      bool more = true;
      run_when_idle(
          [&](const std::stop_token& starved) {
            while (more && !starved.stop_requested()) {
              more = patches.finish();
              if (more && urgent_ == 0 && clock_.now() < until) pace.rest();
            }
          },
          kIdlePatience);
    });
    const ExclusiveHold batches_that_had_begun(model_.commits.lock);
  }
  patches.settle();
}

// Throws std::exception where the model gives other answers. Batches wait for it, so one of the
// model's two methods is called: a commit changes weights, which both have in common, and no code.
void FollowedVersion::replay(const Staged& staged) {
  if (!staged.golden.has_value()) return;
  const GoldenBounds bounds{.atol = staged.commit.info.golden_atol,
                            .rtol = staged.commit.info.golden_rtol};
  staged.golden->replay(*session_, bounds, /*shared=*/false);
}

FollowedVersion::Undo FollowedVersion::undo_to(CommitNumber to) const {
  std::vector<std::shared_ptr<StagedPatches>> undo;
  for (auto commit = applied_.rbegin(); commit != applied_.rend() && commit->number > to;
       ++commit) {
    undo.push_back(commit->replaced.lock());
    if (undo.back() == nullptr) return std::nullopt;
  }
  return undo;
}

bool FollowedVersion::must_reload() const {
  const Urgent urgent(*this);
  const MutexLock lock(mutex_);
  try {
    const Step step = next(read_fence(log_folder_), {});
    return step.kind == Step::Kind::kBack && !undo_to(step.number).has_value();
  } catch (const UsageError&) {  // nobody knows what is fenced
    return false;
  }
}

FollowedVersion::Outcome FollowedVersion::go_back(CommitNumber to) {
  const Undo undo = undo_to(to);
  if (!undo.has_value()) {
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
    model_.runner.weights()->take_back(*undo);
    model_.commits.commit = to;
    applied_.resize(applied_.size() - undo->size());
  }
  for (const auto& patches : *undo) undo_.forget(patches);
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
  return !refused_->again || clock_.now() - refused_->when < kAgainPatience;
}

void FollowedVersion::refuse(CommitNumber number, const CommitRefusal& why, const Fingerprint& file,
                             bool again) {
  const bool told = refused_.has_value() && refused_->number == number &&
                    refused_->reason == why.reason && refused_->file == file;
  refused_ = Refused{
      .number = number, .reason = why.reason, .file = file, .again = again, .when = clock_.now()};
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
  const Urgent urgent(*this);
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
