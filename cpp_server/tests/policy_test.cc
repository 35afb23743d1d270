// The batching policy and the cost model.
#include <gtest/gtest.h>

#include "batching/cost_model.h"
#include "batching/policy.h"
#include "common/clock.h"

namespace tessera {
namespace {

TEST(ClockTest, WhatIsBeyondATimePointIsNever) {
  using std::chrono::nanoseconds;
  using std::chrono::seconds;
  const TimePoint now(seconds(1'000) + nanoseconds(5));
  EXPECT_EQ(later(now, seconds(2), nanoseconds(7)), TimePoint(seconds(1'002) + nanoseconds(12)));
  EXPECT_EQ(later(now, seconds(-2), nanoseconds(7)), TimePoint(seconds(998) + nanoseconds(12)));
  const auto reach = std::chrono::floor<seconds>(kNever - now);
  const nanoseconds most(999'999'999);
  EXPECT_LT(later(now, reach - seconds(1), most), kNever);
  EXPECT_GT(later(now, reach - seconds(1), most), now + reach - seconds(1));
  EXPECT_EQ(later(now, reach, nanoseconds(0)), kNever);
  EXPECT_EQ(later(now, seconds::max(), most), kNever);
}

using namespace std::chrono_literals;
using Kind = Decision::Kind;

constexpr TimePoint kStart{1000s};

struct PolicyCase {
  const char* name;
  QueueState state;
  BatchLimits limits;
  Duration now;  // after kStart
  Decision expected;
};

class Policy : public testing::TestWithParam<PolicyCase> {};

TEST_P(Policy, Decides) {
  const PolicyCase& c = GetParam();
  const Decision found = decide(c.state, c.limits, kStart + c.now);
  EXPECT_EQ(found.kind, c.expected.kind);
  if (c.expected.kind == Kind::kCut) {
    EXPECT_EQ(found.reason, c.expected.reason);
    EXPECT_EQ(found.samples, c.expected.samples);
  }
  if (c.expected.kind == Kind::kWaitUntil) {
    EXPECT_EQ(found.time, c.expected.time);
  }
}

constexpr BatchLimits kAtOnce{.max_samples = 8, .max_ids = 100, .max_delay = 0ns};
constexpr BatchLimits kPatient{.max_samples = 8, .max_ids = 100, .max_delay = 1ms};

QueueState waiting(std::int64_t samples, std::int64_t ids) {
  return {.parts = 1, .samples = samples, .ids = ids, .oldest = kStart};
}

QueueState waiting_with_deadline(Duration deadline, Duration forward) {
  QueueState state = waiting(1, 1);
  state.earliest_deadline = kStart + deadline;
  state.time = {.fixed_seconds = seconds(forward)};
  return state;
}

QueueState draining() {
  QueueState state = waiting(1, 1);
  state.draining = true;
  return state;
}

// Two workers, passes that use 30 us and 5 us per sample.
constexpr BatchLimits kShared{.max_samples = 512, .max_ids = 10'000, .sharers = 2};
constexpr PassCost kUsual{.fixed_seconds = 30e-6, .per_sample_seconds = 5e-6};

QueueState queued(std::int64_t parts, std::int64_t samples, WorkerKind asks) {
  return {.parts = parts,
          .samples = samples,
          .ids = samples,
          .oldest = kStart,
          .work = kUsual,
          .asks = asks};
}

QueueState of_one_size(std::int64_t parts, std::int64_t samples, Duration forward) {
  QueueState state = queued(parts, samples, WorkerKind::kSpare);
  state.work = {.fixed_seconds = seconds(forward)};
  return state;
}

QueueState draining_spare() {
  QueueState state = queued(1, 1, WorkerKind::kSpare);
  state.draining = true;
  return state;
}

BatchLimits with_delay() {
  BatchLimits limits = kShared;
  limits.max_delay = 1ms;
  return limits;
}

BatchLimits between(int sharers) {
  BatchLimits limits = kShared;
  limits.sharers = sharers;
  return limits;
}

constexpr WorkerKind kOrdinary = WorkerKind::kOrdinary;
constexpr WorkerKind kSpare = WorkerKind::kSpare;

Decision cut(CutReason reason, std::int64_t samples = 8) {
  return {Kind::kCut, reason, kStart, samples};
}
Decision until(Duration time) { return {Kind::kWaitUntil, CutReason::kIdle, kStart + time}; }

const PolicyCase kPolicyCases[] = {
    {"empty", {}, kAtOnce, 0ns, {}},
    {"empty_and_draining", {.draining = true}, kAtOnce, 0ns, {}},
    {"idle_worker_takes_what_is_there", waiting(1, 1), kAtOnce, 0ns, cut(CutReason::kIdle)},
    {"full_of_samples", waiting(8, 1), kPatient, 0ns, cut(CutReason::kFull)},
    {"full_of_ids", waiting(1, 100), kPatient, 0ns, cut(CutReason::kFull)},
    {"waits_for_company", waiting(7, 99), kPatient, 100us, until(1ms)},
    {"delay_is_over", waiting(1, 1), kPatient, 1ms, cut(CutReason::kDelay)},
    {"draining_does_not_wait", draining(), kPatient, 0ns, cut(CutReason::kDrain)},
    {"deadline_shortens_the_wait", waiting_with_deadline(800us, 100us), kPatient, 0ns,
     until(600us)},
    {"deadline_is_near", waiting_with_deadline(800us, 100us), kPatient, 600us,
     cut(CutReason::kDeadline)},
    {"deadline_is_far", waiting_with_deadline(1h, 100us), kPatient, 0ns, until(1ms)},
    // 64 requests of a sample: 350 us of work, but 5.5 us each.
    {"spare_sleeps_while_requests_are_small", queued(64, 64, kSpare), kShared, 0ns, {}},
    {"small_requests_go_to_one_worker", queued(64, 64, kOrdinary), kShared, 0ns,
     cut(CutReason::kIdle, 512)},
    {"spare_sleeps_while_little_waits", queued(1, 50, kSpare), kShared, 0ns, {}},
    {"spare_takes_a_heavy_request", queued(1, 100, kSpare), kShared, 0ns,
     cut(CutReason::kIdle, 50)},
    {"spare_takes_half_of_heavy_requests", queued(4, 400, kSpare), kShared, 0ns,
     cut(CutReason::kIdle, 200)},
    {"worker_leaves_half_of_heavy_requests", queued(4, 400, kOrdinary), kShared, 0ns,
     cut(CutReason::kIdle, 200)},
    {"worker_without_sharers_takes_all", queued(4, 400, kOrdinary), between(1), 0ns,
     cut(CutReason::kIdle, 512)},
    {"a_share_is_within_the_limit", queued(40, 4'000, kOrdinary), kShared, 0ns,
     cut(CutReason::kFull, 512)},
    // Four times 30 us are those of 24 samples.
    {"a_share_is_worth_its_fixed_cost", queued(4, 400, kOrdinary), between(64), 0ns,
     cut(CutReason::kIdle, 24)},
    {"one_size_shows_no_share", of_one_size(4, 400, 480us), kShared, 0ns,
     cut(CutReason::kIdle, 512)},
    {"nothing_known_wakes_no_spare", of_one_size(4, 400, 0us), kShared, 0ns, {}},
    {"spare_waits_for_company_too", queued(4, 400, kSpare), with_delay(), 0ns, until(1ms)},
    {"spare_need_not_drain", draining_spare(), kShared, 0ns, {}},
};

INSTANTIATE_TEST_SUITE_P(Batching, Policy, testing::ValuesIn(kPolicyCases),
                         [](const auto& tested) { return std::string(tested.param.name); });

struct HereCase {
  const char* name;
  TurnState state;
  BatchLimits limits;
  bool here;
};

class RunsHere : public testing::TestWithParam<HereCase> {};

TEST_P(RunsHere, Decides) {
  EXPECT_EQ(runs_here(GetParam().state, GetParam().limits), GetParam().here);
}

// One worker is free; a pass uses 30 us and 5 us per sample, an id is a sample's.
TurnState beside_free(std::int64_t samples) {
  return {.parts = samples,
          .samples = samples,
          .ids = samples,
          .work = {.fixed_seconds = 30e-6, .per_sample_seconds = 5e-6},
          .free_workers = 1};
}

TurnState beside_free_but(void (*change)(TurnState&)) {
  TurnState state = beside_free(1);
  change(state);
  return state;
}

TurnState cheap_beside_free(std::int64_t samples) {
  TurnState state = beside_free(samples);
  state.work = {.fixed_seconds = 1e-6};
  return state;
}

const HereCase kHereCases[] = {
    {"nothing_was_brought", beside_free(0), kShared, false},
    {"a_sample", beside_free(1), kShared, true},
    {"also_without_sharers", beside_free(1), between(1), true},
    {"as_many_as_a_short_pass_has", beside_free(2), kShared, true},  // 40 us
    {"one_more", beside_free(3), kShared, false},
    {"as_many_as_a_batch_has", cheap_beside_free(8), kAtOnce, true},
    {"more_than_a_batch", cheap_beside_free(9), kAtOnce, false},
    {"no_worker_is_free", beside_free_but([](TurnState& state) { state.free_workers = 0; }),
     kShared, false},
    {"draining", beside_free_but([](TurnState& state) { state.draining = true; }), kShared, false},
    {"shared_features", beside_free_but([](TurnState& state) { state.shared_rows = true; }),
     kShared, false},
    {"company_is_waited_for", beside_free(1), with_delay(), false},
    {"nothing_is_known", beside_free_but([](TurnState& state) { state.work = {}; }), kShared,
     false},
    {"many_ids", beside_free_but([](TurnState& state) { state.ids = 1'024; }), kShared, true},
    {"too_many_ids", beside_free_but([](TurnState& state) { state.ids = 1'025; }), kShared, false},
    {"more_ids_than_a_batch_has", beside_free_but([](TurnState& state) { state.ids = 101; }),
     kAtOnce, false},
};

INSTANTIATE_TEST_SUITE_P(Batching, RunsHere, testing::ValuesIn(kHereCases),
                         [](const auto& tested) { return std::string(tested.param.name); });

TEST(CostModel, FindsALine) {
  CostModel model;
  EXPECT_EQ(model.cost().of(10), 0ns);
  for (int round = 0; round < 50; ++round) {
    for (const int n : {1, 8, 64}) model.observe(n, 100us + n * 10us);
  }
  EXPECT_NEAR(seconds(model.cost().of(32)), 420e-6, 1e-9);
  EXPECT_NEAR(seconds(model.cost().of(512)), 5220e-6, 1e-8);
}

TEST(CostModel, FollowsTheMachine) {
  CostModel model;
  for (int i = 0; i < 100; ++i) model.observe(8, 1ms);
  EXPECT_NEAR(seconds(model.cost().of(64)), 1e-3, 1e-9);  // one size says nothing of the slope
  for (int i = 0; i < 640; ++i) model.observe(8, 2ms);    // ten half-lives
  EXPECT_NEAR(seconds(model.cost().of(8)), 2e-3, 2e-6);
}

}  // namespace
}  // namespace tessera
