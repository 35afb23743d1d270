// The queue of requests, its scheduler and the split of large requests.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <deque>
#include <thread>

#include "batching/batch_scheduler.h"
#include "batching/request_queue.h"
#include "request/decoder.h"
#include "support.h"

namespace tessera {
namespace {

using namespace std::chrono_literals;
using test::Random;

constexpr TimePoint kStart{1000s};
constexpr WorkerKind kOrdinary = WorkerKind::kOrdinary;
constexpr WorkerKind kSpare = WorkerKind::kSpare;

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
    requests.reserve(taken.size());
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

// Nothing that is queued waits for a worker that is not coming: with one worker on its way at a
// time, some of which leave their wait by themselves.
TEST(BatchScheduler, LeavesNothingBehind) {
  SteadyClock clock;
  BatchScheduler queue({}, {.max_samples = 8, .max_delay = 50us}, clock);
  for (const int samples : {1, 2, 4, 8}) queue.observe(samples, 1us, samples * 1us);
  std::atomic<int> taken = 0;
  std::vector<std::jthread> workers;
  workers.reserve(6);
  for (int i = 0; i < 6; ++i) {
    workers.emplace_back([&] {
      CutBatch batch;
      while (queue.next(kOrdinary, batch)) taken += static_cast<int>(batch.parts.size());
    });
  }
  std::deque<Item> items;
  std::vector<DroppedPart> dropped;
  for (int round = 1; round <= 300; ++round) {
    for (int i = 0; i < 4; ++i) {
      ASSERT_TRUE(queue.submit(items.emplace_back(1).parts(), dropped).ok());
    }
    while (taken < 4 * round) std::this_thread::yield();
  }
  queue.close();
}

TEST(BatchScheduler, GivesWorkersWhatIsQueuedAndEnds) {
  SteadyClock clock;
  BatchScheduler queue({.max_requests = 1'000, .max_samples = 1'000}, {.max_samples = 4}, clock);
  std::atomic<int> taken = 0;
  std::vector<std::jthread> workers;
  workers.reserve(3);
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
  std::vector<DroppedPart> dropped;
  EXPECT_EQ(queue.submit(items.emplace_back(1).parts(), dropped).code, Code::kUnavailable);
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

TEST(BatchScheduler, ShowsWhetherAWorkerIsFreeAndWhatPassesCost) {
  SteadyClock clock;
  BatchScheduler queue({}, {.max_samples = 512}, clock);
  EXPECT_EQ(queue.outlook().free_workers, 0);
  EXPECT_EQ(queue.outlook().work.of(1), 0ns);
  for (const int samples : {1, 2, 4, 8}) queue.observe(samples, 1h, samples * 1us + 10us);
  EXPECT_NEAR(seconds(queue.outlook().work.of(5)), 15e-6, 1e-8);
  std::atomic<bool> goes_on = false;
  std::jthread worker([&] {
    CutBatch own;
    EXPECT_TRUE(queue.next(kOrdinary, own));
    while (!goes_on) std::this_thread::yield();
    EXPECT_FALSE(queue.next(kOrdinary, own));
  });
  while (queue.outlook().free_workers == 0) std::this_thread::yield();
  EXPECT_EQ(queue.outlook().free_workers, 1);
  Item item(1);
  std::vector<DroppedPart> dropped;
  ASSERT_TRUE(queue.submit(item.parts(), dropped).ok());
  EXPECT_EQ(queue.outlook().free_workers, 0);  // woken, and computing from then on
  goes_on = true;
  while (queue.outlook().free_workers == 0) std::this_thread::yield();
  EXPECT_FALSE(queue.outlook().ending);
  queue.drain();
  EXPECT_TRUE(queue.outlook().ending);
  queue.close();
}

TEST(BatchScheduler, TriesToSubmit) {
  SteadyClock clock;
  BatchScheduler queue({.max_requests = 2}, {}, clock);
  std::deque<Item> items;
  std::vector<Part> parts;
  for (int i = 0; i < 3; ++i) {
    for (Part& part : items.emplace_back(2).parts()) parts.push_back(std::move(part));
  }
  std::vector<DroppedPart> dropped;
  std::vector<RefusedRequest> refused;
  EXPECT_TRUE(queue.try_submit(parts, dropped, refused));
  EXPECT_EQ(queue.depth().requests, 2);
  ASSERT_EQ(refused.size(), 1U);
  EXPECT_EQ(refused.front().request, &items.back());
  EXPECT_EQ(refused.front().status.code, Code::kResourceExhausted);
}

// As event loops do: what a loop cannot bring at once it brings with what comes next.
TEST(BatchScheduler, TakesWhatManyLoopsBringAndLosesNothing) {
  SteadyClock clock;
  BatchScheduler queue({.max_requests = 10'000, .max_samples = 10'000}, {.max_samples = 8}, clock);
  std::atomic<int> taken = 0;
  std::vector<std::jthread> workers;
  workers.reserve(2);
  for (int i = 0; i < 2; ++i) {
    workers.emplace_back([&] {
      CutBatch batch;
      while (queue.next(kOrdinary, batch)) {
        taken += static_cast<int>(batch.parts.size());
        queue.observe(static_cast<std::int64_t>(batch.parts.size()), 20us, 20us);
      }
    });
  }
  std::array<std::deque<Item>, 4> brought;
  std::vector<std::jthread> loops;
  loops.reserve(brought.size());
  for (std::deque<Item>& items : brought) {
    loops.emplace_back([&] {
      std::vector<Part> kept;
      std::vector<DroppedPart> dropped;
      std::vector<RefusedRequest> refused;
      for (int k = 0; k < 1'000; ++k) {
        kept.push_back(std::move(items.emplace_back(1).parts().front()));
        EXPECT_LE(queue.outlook().free_workers, 2);
        if (queue.try_submit(kept, dropped, refused)) kept.clear();
      }
      queue.submit(kept, dropped, refused);
      EXPECT_TRUE(dropped.empty() && refused.empty());
    });
  }
  loops.clear();
  queue.close();
  workers.clear();
  EXPECT_EQ(taken, 4'000);
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
