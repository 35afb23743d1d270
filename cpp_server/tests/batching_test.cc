// The batching policy, the cost model, the queue and the split of large requests.
#include <gtest/gtest.h>

#include <deque>
#include <thread>

#include "batching/batch_queue.h"
#include "batching/cost_model.h"
#include "batching/policy.h"
#include "batching/request_queue.h"
#include "request/decoder.h"
#include "support.h"

namespace tessera {
namespace {

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
  }
  if (c.expected.kind == Kind::kWaitUntil) {
    EXPECT_EQ(found.time, c.expected.time);
  }
}

constexpr BatchLimits kAtOnce{.max_samples = 8, .max_ids = 100, .max_delay = 0ns};
constexpr BatchLimits kPatient{.max_samples = 8, .max_ids = 100, .max_delay = 1ms};

QueueState waiting(std::int64_t samples, std::int64_t ids) {
  return {.entries = 1, .samples = samples, .ids = ids, .oldest = kStart};
}

QueueState waiting_with_deadline(Duration deadline, Duration forward) {
  QueueState state = waiting(1, 1);
  state.earliest_deadline = kStart + deadline;
  state.expected_forward = forward;
  return state;
}

QueueState draining() {
  QueueState state = waiting(1, 1);
  state.draining = true;
  return state;
}

Decision cut(CutReason reason) { return {Kind::kCut, reason, kStart}; }
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
};

INSTANTIATE_TEST_SUITE_P(Batching, Policy, testing::ValuesIn(kPolicyCases),
                         [](const auto& tested) { return std::string(tested.param.name); });

TEST(CostModel, FindsALine) {
  CostModel model;
  EXPECT_EQ(model.predict(10), 0ns);
  for (int round = 0; round < 50; ++round) {
    for (const int n : {1, 8, 64}) model.observe(n, 100us + n * 10us);
  }
  EXPECT_NEAR(seconds(model.predict(32)), 420e-6, 1e-9);
  EXPECT_NEAR(seconds(model.predict(512)), 5220e-6, 1e-8);
}

TEST(CostModel, FollowsTheMachine) {
  CostModel model;
  for (int i = 0; i < 100; ++i) model.observe(8, 1ms);
  EXPECT_NEAR(seconds(model.predict(64)), 1e-3, 1e-9);  // one size says nothing of the slope
  for (int i = 0; i < 640; ++i) model.observe(8, 2ms);  // ten half-lives
  EXPECT_NEAR(seconds(model.predict(8)), 2e-3, 2e-6);
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

  RequestQueue queue{{.max_entries = 3, .max_samples = 20}};
  std::vector<DroppedPart> dropped;
};

using Requests = std::vector<PendingRequest*>;

TEST_F(QueueTest, ServesByPriorityThenArrival) {
  Item a(1), b(1, 0, 5), c(1);
  ASSERT_TRUE(push(a) && push(b) && push(c));
  EXPECT_EQ(cut_now(), (Requests{&b, &a, &c}));
  EXPECT_EQ(queue.entries(), 0);
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
  EXPECT_FALSE(push(g));  // entries
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

TEST(BatchQueue, GivesWorkersWhatIsQueuedAndEnds) {
  SteadyClock clock;
  BatchQueue queue({.max_entries = 1'000, .max_samples = 1'000}, {.max_samples = 4}, clock);
  std::atomic<int> taken = 0;
  std::vector<std::jthread> workers;
  for (int i = 0; i < 3; ++i) {
    workers.emplace_back([&] {
      CutBatch batch;
      while (queue.next(batch)) {
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

TEST(BatchQueue, DrainEndsTheWaitForCompany) {
  SteadyClock clock;
  BatchQueue queue({}, {.max_samples = 4, .max_delay = 1h}, clock);
  CutBatch batch;
  std::jthread worker([&] { EXPECT_TRUE(queue.next(batch)); });
  Item item(1);
  std::vector<DroppedPart> dropped;
  item.arrival = clock.now();
  EXPECT_TRUE(queue.submit(item.parts(), dropped).ok());
  queue.drain();
  worker.join();
  EXPECT_EQ(batch.reason, CutReason::kDrain);
}

TEST(BatchQueue, SaysWhatIsFull) {
  SteadyClock clock;
  BatchQueue queue({.max_entries = 1, .max_samples = 50}, {}, clock);
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
    const std::vector<Part> parts = split_request(item, 1, max_samples, max_ids);
    std::int64_t row = 0;
    std::int64_t ids = 0;
    for (const Part& part : parts) {
      EXPECT_EQ(part.row_begin, row);
      row = part.row_end;
      ids += part.ids;
      EXPECT_LE(part.samples(), max_samples);
      EXPECT_TRUE(part.ids <= max_ids || part.samples() == 1);
    }
    EXPECT_EQ(row, samples);
    EXPECT_EQ(ids, item.request.ids);
  }
}

}  // namespace
}  // namespace tessera
