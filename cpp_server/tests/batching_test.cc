// The batching policy, the cost model, the queue and the split of large requests.
#include <gtest/gtest.h>

#include <deque>
#include <thread>

#include "batching/batch_scheduler.h"
#include "batching/cost_model.h"
#include "batching/policy.h"
#include "batching/request_queue.h"
#include "request/decoder.h"
#include "support.h"

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
using test::Random;
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
  QueueState state;
  BatchLimits limits;
  bool here;
};

class RunsHere : public testing::TestWithParam<HereCase> {};

TEST_P(RunsHere, Decides) {
  EXPECT_EQ(runs_here(GetParam().state, GetParam().limits), GetParam().here);
}

// One worker is idle; a pass uses 30 us and 5 us per sample, an id is a sample's.
QueueState beside_idle(std::int64_t samples) {
  QueueState state = queued(samples, samples, kOrdinary);
  state.idle_workers = 1;
  return state;
}

QueueState beside_idle_but(void (*change)(QueueState&)) {
  QueueState state = beside_idle(1);
  change(state);
  return state;
}

QueueState cheap_beside_idle(std::int64_t samples) {
  QueueState state = beside_idle(samples);
  state.work = {.fixed_seconds = 1e-6};
  return state;
}

const HereCase kHereCases[] = {
    {"nothing_is_queued", beside_idle(0), kShared, false},
    {"a_sample", beside_idle(1), kShared, true},
    {"also_without_sharers", beside_idle(1), between(1), true},
    {"as_many_as_a_short_pass_has", beside_idle(2), kShared, true},  // 40 us
    {"one_more", beside_idle(3), kShared, false},
    {"as_many_as_a_batch_has", cheap_beside_idle(8), kAtOnce, true},
    {"more_than_a_batch", cheap_beside_idle(9), kAtOnce, false},
    {"all_workers_compute", queued(1, 1, kOrdinary), kShared, false},
    {"draining", beside_idle_but([](QueueState& state) { state.draining = true; }), kShared, false},
    {"company_is_waited_for", beside_idle(1), with_delay(), false},
    {"nothing_is_known", beside_idle_but([](QueueState& state) { state.work = {}; }), kShared,
     false},
    {"time_does_not_count",
     beside_idle_but([](QueueState& state) { state.time = {.fixed_seconds = 1}; }), kShared, true},
    {"many_ids", beside_idle_but([](QueueState& state) { state.ids = 1'024; }), kShared, true},
    {"too_many_ids", beside_idle_but([](QueueState& state) { state.ids = 1'025; }), kShared, false},
    {"more_ids_than_a_batch_has", beside_idle_but([](QueueState& state) { state.ids = 101; }),
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

// A request without content, for the queue; it records how it ended.
class Item final : public PendingRequest {
 public:
  explicit Item(std::int64_t samples, std::int64_t ids = 0, std::int32_t its_priority = 0) {
    request.samples = samples;
    request.ids = ids;
    priority = its_priority;
    arrival = kStart;
  }

  std::vector<Part> parts() {
    expect_parts(1, 1);
    Part part;
    part.request = this;
    part.last = true;
    part.row_end = request.samples;
    part.ids = request.ids;
    return {part};
  }

  bool answered = false;
  std::optional<Refusal> refusal;
  std::vector<float> scores;

 private:
  void answer(std::span<const OutputView> outputs, const StageTimings&) override {
    answered = true;
    scores.assign(outputs[0].data, outputs[0].data + outputs[0].count);
  }
  void fail(const Refusal& given) override { refusal = given; }
};

struct QueueTest : testing::Test {
  bool push(Item& item, TimePoint now = kStart) {
    std::vector<Part> parts = item.parts();
    return queue.push(parts, now, dropped);
  }
  std::vector<PendingRequest*> cut_now(std::int64_t max_samples = 8, std::int64_t max_ids = 100,
                                       TimePoint now = kStart) {
    std::vector<Part> taken;
    queue.cut(max_samples, max_ids, now, taken, dropped);
    std::vector<PendingRequest*> requests;
    for (const Part& part : taken) requests.push_back(part.request);
    return requests;
  }

  RequestQueue queue{{.max_requests = 3, .max_samples = 20}};
  std::vector<DroppedPart> dropped;
};

using Requests = std::vector<PendingRequest*>;

TEST_F(QueueTest, ServesByPriorityThenArrival) {
  Item a(1), b(1, 0, 5), c(1);
  ASSERT_TRUE(push(a) && push(b) && push(c));
  EXPECT_EQ(cut_now(), (Requests{&b, &a, &c}));
  EXPECT_EQ(queue.parts(), 0);
}

TEST_F(QueueTest, CutsByLimits) {
  Item a(5), b(3), c(1);
  ASSERT_TRUE(push(a) && push(b) && push(c));
  EXPECT_EQ(queue.samples(), 9);
  EXPECT_EQ(cut_now(8), (Requests{&a, &b}));
  EXPECT_EQ(cut_now(8), (Requests{&c}));
  Item d(1, 60), e(1, 50);
  ASSERT_TRUE(push(d) && push(e));
  EXPECT_EQ(cut_now(8, 100), (Requests{&d}));
}

TEST_F(QueueTest, TakesTheFirstWhateverItsSize) {
  Item large(20, 1'000);
  ASSERT_TRUE(push(large));
  EXPECT_EQ(cut_now(8, 100), (Requests{&large}));
}

TEST_F(QueueTest, IsBounded) {
  Item a(10), b(10), c(1);
  ASSERT_TRUE(push(a) && push(b));
  EXPECT_FALSE(push(c));  // samples
  cut_now(20, 100);
  Item d(1), e(1), f(1), g(1);
  ASSERT_TRUE(push(d) && push(e) && push(f));
  EXPECT_FALSE(push(g));  // requests
}

TEST_F(QueueTest, CountsARequestOnceUntilItsLastPartIsTaken) {
  RequestQueue one{{.max_requests = 1, .max_samples = 20}};
  Item item(6), other(1);
  std::vector<Part> parts(3);
  for (std::size_t i = 0; i < parts.size(); ++i) {
    parts[i].request = &item;
    parts[i].index = i;
    parts[i].last = i == 2;
    parts[i].row_begin = static_cast<std::int64_t>(2 * i);
    parts[i].row_end = parts[i].row_begin + 2;
  }
  ASSERT_TRUE(one.push(parts, kStart, dropped));
  for (const std::int64_t left : {1, 1, 0}) {
    std::vector<Part> refused = other.parts();
    EXPECT_FALSE(one.push(refused, kStart, dropped));
    std::vector<Part> taken;
    one.cut(2, 100, kStart, taken, dropped);
    EXPECT_EQ(taken.size(), 1u);
    EXPECT_EQ(one.requests(), left);
  }
  std::vector<Part> at_last = other.parts();
  EXPECT_TRUE(one.push(at_last, kStart, dropped));
}

TEST_F(QueueTest, ThePartsOfADeadRequestMakeRoomForOne) {
  RequestQueue one{{.max_requests = 1, .max_samples = 20}};
  Item abandoned(2), wanted(1);
  std::vector<Part> parts(2);
  for (std::size_t i = 0; i < parts.size(); ++i) {
    parts[i].request = &abandoned;
    parts[i].index = i;
    parts[i].last = i == 1;
    parts[i].row_begin = static_cast<std::int64_t>(i);
    parts[i].row_end = parts[i].row_begin + 1;
  }
  ASSERT_TRUE(one.push(parts, kStart, dropped));
  abandoned.cancelled = true;
  std::vector<Part> next = wanted.parts();
  EXPECT_TRUE(one.push(next, kStart, dropped));
  EXPECT_EQ(dropped.size(), 2u);
  EXPECT_EQ(one.requests(), 1);
  EXPECT_EQ(one.parts(), 1);
}

TEST_F(QueueTest, DropsTheDeadWhenCutting) {
  Item gone(1), late(1), alive(1);
  late.deadline = kStart + 1ms;
  ASSERT_TRUE(push(gone) && push(late) && push(alive));
  gone.cancelled = true;
  EXPECT_EQ(cut_now(8, 100, kStart + 1ms), (Requests{&alive}));
  ASSERT_EQ(dropped.size(), 2u);
  EXPECT_EQ(dropped[0].reason, RejectReason::kCancelled);
  EXPECT_EQ(dropped[1].reason, RejectReason::kDeadline);
}

TEST_F(QueueTest, ACallThatGrpcEndsAtItsDeadlineWasLate) {
  Item ended(1), alive(1);
  ended.deadline = alive.deadline = kStart + 10ms;
  ASSERT_TRUE(push(ended) && push(alive));
  ended.cancelled = true;
  EXPECT_EQ(cut_now(8, 100, kStart + 6ms), (Requests{&alive}));
  ASSERT_EQ(dropped.size(), 1u);
  EXPECT_EQ(dropped[0].reason, RejectReason::kDeadline);
}

TEST(Deadline, IsTakenAsGrpcRoundsIt) {
  // A timeout of 1.234 s arrives as one of 1.24 s.
  EXPECT_TRUE(ended_by_deadline(kStart + 1234ms, kStart, kStart + 1240ms));
  EXPECT_FALSE(ended_by_deadline(kStart + 1200ms, kStart, kStart + 1240ms));
  EXPECT_FALSE(ended_by_deadline(kStart + 1h, kStart, kNever));
}

TEST_F(QueueTest, TheDeadMakeRoom) {
  Item a(1), b(1), c(1), d(1);
  ASSERT_TRUE(push(a) && push(b) && push(c));
  b.cancelled = true;
  EXPECT_TRUE(push(d));
  ASSERT_EQ(dropped.size(), 1u);
  EXPECT_EQ(dropped[0].part.request, &b);
  EXPECT_EQ(cut_now(), (Requests{&a, &c, &d}));
}

TEST_F(QueueTest, KnowsTheOldestAndTheNextDeadline) {
  EXPECT_EQ(queue.oldest(), kNever);
  Item a(1, 0, 1), b(1);
  a.arrival = kStart + 2ms;
  b.arrival = kStart + 1ms;
  b.deadline = kStart + 9ms;
  ASSERT_TRUE(push(a) && push(b));
  EXPECT_EQ(queue.oldest(), kStart + 1ms);
  EXPECT_EQ(queue.earliest_deadline(), kStart + 9ms);
}

TEST(BatchScheduler, GivesWorkersWhatIsQueuedAndEnds) {
  SteadyClock clock;
  BatchScheduler queue({.max_requests = 1'000, .max_samples = 1'000}, {.max_samples = 4}, clock);
  std::atomic<int> taken = 0;
  std::vector<std::jthread> workers;
  for (int i = 0; i < 3; ++i) {
    workers.emplace_back([&] {
      CutBatch batch;
      while (queue.next(kOrdinary, batch)) {
        EXPECT_LE(batch.parts.size(), 4u);
        taken += static_cast<int>(batch.parts.size());
      }
    });
  }
  std::deque<Item> items;
  for (int i = 0; i < 500; ++i) {
    std::vector<DroppedPart> dropped;
    EXPECT_TRUE(queue.submit(items.emplace_back(1).parts(), dropped).ok());
  }
  queue.close();
  workers.clear();
  EXPECT_EQ(taken, 500);
}

TEST(BatchScheduler, WakesASpareWorkerForHeavyWorkAlone) {
  SteadyClock clock;
  BatchScheduler queue({}, {.max_samples = 512, .sharers = 2}, clock);
  // However long a pass takes, what it uses of a CPU counts.
  for (const int samples : {1, 8, 64, 256}) queue.observe(samples, 1h, samples * 5us + 30us);
  std::vector<std::int64_t> taken;
  std::jthread spare([&] {
    CutBatch batch;
    EXPECT_TRUE(queue.next(kSpare, batch));
    for (const Part& part : batch.parts) taken.push_back(part.samples());
  });
  std::deque<Item> items;
  std::vector<DroppedPart> dropped;
  // No ordinary worker takes anything, as if all were busy. Had the small requests woken the spare
  // one, it would have taken them before the heavy ones came.
  for (int i = 0; i < 10; ++i) {
    ASSERT_TRUE(queue.submit(items.emplace_back(1).parts(), dropped).ok());
  }
  EXPECT_EQ(queue.depth().requests, 10);
  for (int i = 0; i < 4; ++i) {
    ASSERT_TRUE(queue.submit(items.emplace_back(300, 0, /*priority*/ 1).parts(), dropped).ok());
  }
  spare.join();
  EXPECT_EQ(taken, (std::vector<std::int64_t>{300}));
  // What it left is an ordinary worker's, also after the end.
  queue.close();
  CutBatch batch;
  std::size_t left = 0;
  while (queue.next(kOrdinary, batch)) left += batch.parts.size();
  EXPECT_GT(left, 0U);
  EXPECT_FALSE(queue.next(kSpare, batch));
}

// A queue whose passes are known to be short, and a worker of it that counts what it takes.
class ShortPasses : public testing::Test {
 protected:
  ShortPasses() {
    for (const int samples : {1, 2, 4, 8}) queue.observe(samples, 1h, samples * 1us + 10us);
    worker = std::jthread([this] {
      CutBatch own;
      while (queue.next(kOrdinary, own)) taken += static_cast<int>(own.parts.size());
    });
  }
  ~ShortPasses() override { queue.close(); }

  Status submit(int samples, Submitter submitter) {
    return queue.submit(items.emplace_back(samples).parts(), dropped, submitter);
  }

  // What next_here gives once the worker waits for requests.
  std::size_t taken_here(int samples) {
    while (true) {
      EXPECT_TRUE(submit(samples, Submitter::kRunsPasses).ok());
      const bool here = queue.next_here(batch);
      if (here) return batch.parts.size();
      while (queue.depth().requests > 0) std::this_thread::yield();
    }
  }

  SteadyClock clock;
  BatchScheduler queue{{}, {.max_samples = 512}, clock};
  std::deque<Item> items;
  std::vector<DroppedPart> dropped;
  CutBatch batch;
  std::atomic<int> taken = 0;
  std::jthread worker;
};

TEST_F(ShortPasses, AreTheSubmitters) {
  ASSERT_EQ(taken_here(1), 1U);  // the worker waits from now on
  const int before = taken;
  ASSERT_TRUE(submit(1, Submitter::kRunsPasses).ok());
  ASSERT_TRUE(submit(2, Submitter::kRunsPasses).ok());
  EXPECT_TRUE(queue.next_here(batch));
  EXPECT_EQ(batch.parts.size(), 2U);
  EXPECT_EQ(batch.reason, CutReason::kIdle);
  EXPECT_FALSE(queue.next_here(batch));
  EXPECT_EQ(taken, before);
}

TEST_F(ShortPasses, GoToAWorkerWhenTheyGrow) {
  ASSERT_EQ(taken_here(1), 1U);
  const int before = taken;
  ASSERT_TRUE(submit(1, Submitter::kRunsPasses).ok());
  ASSERT_TRUE(submit(100, Submitter::kRunsPasses).ok());  // wakes the worker
  while (taken < before + 2) std::this_thread::yield();
  EXPECT_FALSE(queue.next_here(batch));
}

TEST_F(ShortPasses, GoToAWorkerWhenADrainHasBegunMeanwhile) {
  ASSERT_EQ(taken_here(1), 1U);
  const int before = taken;
  ASSERT_TRUE(submit(1, Submitter::kRunsPasses).ok());
  queue.drain();
  EXPECT_FALSE(queue.next_here(batch));
  while (taken < before + 1) std::this_thread::yield();
}

TEST(BatchScheduler, DrainEndsTheWaitForCompany) {
  SteadyClock clock;
  BatchScheduler queue({}, {.max_samples = 4, .max_delay = 1h}, clock);
  CutBatch batch;
  std::jthread worker([&] { EXPECT_TRUE(queue.next(kOrdinary, batch)); });
  Item item(1);
  std::vector<DroppedPart> dropped;
  item.arrival = clock.now();
  EXPECT_TRUE(queue.submit(item.parts(), dropped).ok());
  queue.drain();
  worker.join();
  EXPECT_EQ(batch.reason, CutReason::kDrain);
}

TEST(BatchScheduler, SaysWhatIsFull) {
  SteadyClock clock;
  BatchScheduler queue({.max_requests = 1, .max_samples = 50}, {}, clock);
  Item a(7), b(3);
  std::vector<DroppedPart> dropped;
  ASSERT_TRUE(queue.submit(a.parts(), dropped).ok());
  const Status status = queue.submit(b.parts(), dropped);
  EXPECT_EQ(status.code, Code::kResourceExhausted);
  EXPECT_EQ(status.message,
            "the queue is full: 1 requests with 7 samples wait (limits 1 and 50), this request "
            "brings 3; try again later");
}

TEST(Split, CoversEveryRowOnceWithinTheLimits) {
  Random random(5);
  for (int round = 0; round < 300; ++round) {
    const auto samples = static_cast<std::int32_t>(1 + random() % 40);
    const test::RequestData data = test::random_request(random, samples, 6);
    Item item(samples);
    ASSERT_TRUE(RequestDecoder(test::schema(), {}).decode(data.view(), item.request).ok());
    const auto max_samples = static_cast<std::int64_t>(1 + random() % 12);
    const auto max_ids = static_cast<std::int64_t>(1 + random() % 60);
    const std::vector<Part> parts = cut_request(item, 1, max_samples, max_ids);
    std::int64_t row = 0;
    std::int64_t ids = 0;
    for (const Part& part : parts) {
      EXPECT_EQ(part.row_begin, row);
      row = part.row_end;
      ids += part.ids;
      EXPECT_EQ(part.last, &part == &parts.back());
      EXPECT_LE(part.samples(), max_samples);
      EXPECT_TRUE(part.ids <= max_ids || part.samples() == 1);
    }
    EXPECT_EQ(row, samples);
    EXPECT_EQ(ids, item.request.ids);
  }
}

}  // namespace
}  // namespace tessera
