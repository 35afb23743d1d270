// Merging, running, splitting and rejoining, with a plain function in the model's place.
#include "batching/executor.h"

#include <gtest/gtest.h>

#include <atomic>
#include <deque>
#include <functional>
#include <limits>
#include <new>
#include <stdexcept>
#include <thread>

#include "batching/buffer.h"
#include "batching/merger.h"
#include "common/out_of_memory.h"
#include "request/decoder.h"
#include "request/packed.h"
#include "support.h"

namespace tessera {
namespace {

class Request final : public PendingRequest {
 public:
  explicit Request(test::RequestData given) : data(std::move(given)) {
    const Status status = RequestDecoder(test::schema(), {}).decode(data.view(), request);
    EXPECT_TRUE(status.ok()) << status.message;
  }

  const test::RequestData data;
  int answers = 0;
  std::optional<Refusal> refusal;
  std::vector<float> scores;
  StageTimings timings;

 private:
  void answer(std::span<const OutputView> outputs, const StageTimings& given) override {
    ++answers;
    timings = given;
    scores.assign(outputs[0].data, outputs[0].data + outputs[0].count);
  }
  void fail(const Refusal& given) override {
    EXPECT_FALSE(refusal.has_value());
    refusal = given;
  }
};

// What the model below gives for one row, computed from the request's own numbers.
float expected_score(const test::RequestData& data, std::int32_t row) {
  double score = data.dense[static_cast<std::size_t>(2 * row)] +
                 10.0 * data.dense[static_cast<std::size_t>(2 * row + 1)];
  std::size_t at = 0;
  for (std::size_t bag = 0; bag < data.lengths.size(); ++bag) {
    const bool ours = static_cast<std::int32_t>(bag) % data.samples == row;
    for (std::int32_t k = 0; k < data.lengths[bag]; ++k, ++at) {
      const auto id = data.narrow.empty() ? data.values[at] : data.narrow[at];
      if (ours)
        score += static_cast<double>(id % 97) *
                 static_cast<double>(bag / static_cast<std::size_t>(data.samples) + 1);
    }
  }
  at = 0;
  for (std::size_t bag = 0; bag < data.scored_lengths.size(); ++bag) {
    for (std::int32_t k = 0; k < data.scored_lengths[bag]; ++k, ++at) {
      if (static_cast<std::int32_t>(bag) == row) {
        score += data.weights[at] * static_cast<double>(data.scored_values[at] % 89);
      }
    }
  }
  return static_cast<float>(score);
}

class PlainScores final : public Scores {
 public:
  explicit PlainScores(std::vector<float> given) : values(std::move(given)) {}
  std::span<const float> output(std::size_t) const override { return values; }
  std::vector<float> values;
};

class PlainSession final : public test::MemorySession {
 public:
  PlainSession() : MemorySession(test::schema()) {}

  std::unique_ptr<Scores> forward(const HostBatch& batch) override {
    ++passes;
    if (before) before(batch);
    narrow_passes += !batch.id_list.narrow.empty();
    const auto B = static_cast<std::size_t>(batch.rows);
    const auto id = [](const HostGroup& group, std::size_t at) {
      return group.narrow.empty() ? group.values[at] : group.narrow[at];
    };
    std::vector<double> scores(B);
    for (std::size_t b = 0; b < B; ++b) {
      scores[b] = batch.dense[2 * b] + 10.0 * batch.dense[2 * b + 1];
    }
    std::size_t at = 0;
    for (std::size_t bag = 0; bag < batch.id_list.lengths.size(); ++bag) {
      for (std::int32_t k = 0; k < batch.id_list.lengths[bag]; ++k) {
        scores[bag % B] +=
            static_cast<double>(id(batch.id_list, at++) % 97) * static_cast<double>(bag / B + 1);
      }
    }
    EXPECT_EQ(at, batch.id_list.ids());
    at = 0;
    for (std::size_t bag = 0; bag < batch.id_score_list.lengths.size(); ++bag) {
      for (std::int32_t k = 0; k < batch.id_score_list.lengths[bag]; ++k, ++at) {
        scores[bag] +=
            batch.id_score_list.weights[at] * static_cast<double>(id(batch.id_score_list, at) % 89);
      }
    }
    EXPECT_EQ(at, batch.id_score_list.ids());
    for (auto row = static_cast<std::size_t>(batch.samples); row < B; ++row) {
      EXPECT_EQ(scores[row], 0) << "padding";
    }
    scores.resize(static_cast<std::size_t>(batch.samples));
    return std::make_unique<PlainScores>(std::vector<float>(scores.begin(), scores.end()));
  }

  int passes = 0;
  int narrow_passes = 0;
  std::function<void(const HostBatch&)> before;
};

class Observer final : public ExecutionObserver {
 public:
  void on_pass(const PassTimings& pass, Duration) override { samples.push_back(pass.samples); }
  void on_scores(const Scores& given, std::int64_t count) override {
    const auto own = given.output(0).first(static_cast<std::size_t>(count));
    scores.insert(scores.end(), own.begin(), own.end());
  }
  void on_retry(std::size_t parts, const std::string&) override { retried += parts; }
  Refusal on_failure(const std::exception& failure) override {
    return {{Code::kInternal, std::string("failed: ") + failure.what()}, std::nullopt};
  }

  std::vector<Part> cut_again(PendingRequest& request) override {
    ++cut;
    return cut_request(request, 1, 7, 1'000'000);
  }

  std::vector<std::int64_t> samples;
  std::vector<float> scores;
  std::size_t retried = 0;
  int cut = 0;
};

struct ExecutorTest : testing::Test {
  const InputSchema schema = test::schema();
  PlainSession runner;
  SteadyClock clock;
  Observer observer;
  Executor executor{schema, runner, clock, observer};
  test::Random random{7};

  std::vector<Part> parts_of(Request& request, std::int64_t max_samples = 1'000) {
    request.arrival = clock.now();
    return cut_request(request, 1, max_samples, 1'000'000);
  }

  static void expect_answered(const Request& request) {
    ASSERT_EQ(request.answers, 1);
    ASSERT_EQ(request.scores.size(), static_cast<std::size_t>(request.data.samples));
    for (std::int32_t row = 0; row < request.data.samples; ++row) {
      // Sums of a few dozen terms in the same order; only the narrowing to float rounds.
      EXPECT_FLOAT_EQ(request.scores[static_cast<std::size_t>(row)],
                      expected_score(request.data, row));
    }
  }
};

TEST_F(ExecutorTest, MixedRequestsGetTheirOwnScores) {
  for (int round = 0; round < 200; ++round) {
    std::deque<Request> requests;
    std::vector<Part> batch;
    for (unsigned n = 1 + random() % 12; n > 0; --n) {
      Request& request = requests.emplace_back(
          test::random_request(random, static_cast<std::int32_t>(1 + random() % 5),
                               static_cast<std::int32_t>(random() % 5)));
      for (Part& part : parts_of(request)) batch.push_back(std::move(part));
    }
    executor.execute(batch);
    std::vector<float> answered;
    for (const Request& request : requests) {
      expect_answered(request);
      answered.insert(answered.end(), request.scores.begin(), request.scores.end());
    }
    // Told of after they were delivered, each once and without those of the padding.
    EXPECT_EQ(observer.scores, answered);
    observer.scores.clear();
  }
}

TEST_F(ExecutorTest, PaddingAndInt32IdsChangeNothing) {
  runner.takes_narrow = true;
  for (int round = 0; round < 200; ++round) {
    runner.padding = static_cast<std::int64_t>(random() % 4);
    std::deque<Request> requests;
    std::vector<Part> batch;
    for (unsigned n = 1 + random() % 2; n > 0; --n) {
      Request& request = requests.emplace_back(
          test::random_request(random, static_cast<std::int32_t>(1 + random() % 5), 4));
      for (Part& part : parts_of(request)) batch.push_back(std::move(part));
    }
    executor.execute(batch);
    for (const Request& request : requests) expect_answered(request);
  }
  EXPECT_GT(runner.narrow_passes, 0);
  EXPECT_LT(runner.narrow_passes, runner.passes);
}

TEST_F(ExecutorTest, PartsAreRejoined) {
  for (int round = 0; round < 100; ++round) {
    Request large(test::random_request(random, static_cast<std::int32_t>(2 + random() % 40), 4));
    Request small(test::random_request(random, 2, 4));
    std::vector<Part> parts = parts_of(large, 7);
    std::vector<Part> small_parts = parts_of(small);
    // The last part shares its batch, and the parts run in another order than they were cut.
    small_parts.push_back(std::move(parts.back()));
    parts.pop_back();
    executor.execute(small_parts);
    for (auto part = parts.rbegin(); part != parts.rend(); ++part) executor.execute({&*part, 1});
    expect_answered(large);
    expect_answered(small);
  }
}

TEST_F(ExecutorTest, ARequestIsComputedWithOneCommit) {
  CommitLock commits;
  Executor guarded{schema, runner, clock, observer, &commits};
  for (int round = 0; round < 20; ++round) {
    Request request(test::random_request(random, 30, 4));
    Request other(test::random_request(random, 2, 4));
    std::vector<Part> parts = parts_of(request, 7);
    std::vector<Part> last = parts_of(other);
    last.push_back(std::move(parts.back()));
    parts.pop_back();
    for (const Part& part : parts) guarded.execute({&part, 1});
    const bool changes = round % 2 == 0;
    if (changes) {
      const ExclusiveHold hold(commits.lock);
      ++commits.commit;
    }
    observer.cut = 0;
    runner.passes = 0;
    guarded.execute(last);
    EXPECT_EQ(observer.cut, changes ? 1 : 0);
    EXPECT_EQ(runner.passes, changes ? 1 + 5 : 1);
    expect_answered(request);
    expect_answered(other);
    EXPECT_EQ(request.commit(), commits.commit);
    EXPECT_EQ(other.commit(), commits.commit);
  }
}

TEST_F(ExecutorTest, NoPassBeginsWhileACommitIsApplied) {
  CommitLock commits;
  Executor guarded{schema, runner, clock, observer, &commits};
  std::atomic<bool> inside = false;
  std::atomic<int> seen = 0;
  runner.before = [&](const HostBatch&) {
    if (inside) ++seen;
  };
  constexpr int kCommits = 100;
  std::atomic<int> applied = 0;
  std::jthread writer([&] {
    for (; applied < kCommits; ++applied) {
      const ExclusiveHold hold(commits.lock);
      inside = true;
      ++commits.commit;
      inside = false;
    }
  });
  do {
    Request request(test::random_request(random, 12, 2));
    const std::vector<Part> parts = parts_of(request, 5);
    for (const Part& part : parts) guarded.execute({&part, 1});
    expect_answered(request);
  } while (applied < kCommits);
  EXPECT_EQ(seen, 0);
}

TEST_F(ExecutorTest, OneBadRequestDoesNotFailItsNeighbours) {
  Request a(test::random_request(random, 1, 3));
  Request bad(test::random_request(random, 3, 3));
  Request b(test::random_request(random, 2, 3));
  runner.before = [&](const HostBatch& batch) {
    for (const float value : batch.dense) {
      if (value == bad.data.dense[0]) throw std::runtime_error("cannot");
    }
  };
  std::vector<Part> batch;
  for (Request* request : {&a, &bad, &b}) batch.push_back(parts_of(*request)[0]);
  executor.execute(batch);
  expect_answered(a);
  expect_answered(b);
  ASSERT_TRUE(bad.refusal.has_value());
  EXPECT_EQ(bad.refusal->status.code, Code::kInternal);
  EXPECT_EQ(bad.refusal->status.message, "failed: cannot");
  EXPECT_EQ(bad.answers, 0);
  EXPECT_EQ(observer.retried, 3u);
  EXPECT_EQ(runner.passes, 4);  // together, then each alone
}

TEST(OutOfMemory, IsToldFromOtherFailures) {
  EXPECT_TRUE(out_of_memory(std::bad_alloc()));
  EXPECT_TRUE(out_of_memory(std::bad_array_new_length()));
  EXPECT_TRUE(out_of_memory(std::runtime_error(
      "The following operation failed in the TorchScript interpreter.\nRuntimeError: [enforce fail "
      "at alloc_cpu.cpp:119] . DefaultCPUAllocator: not enough memory: you tried to allocate "
      "40000000 bytes. Error code 12 (Cannot allocate memory)")));
  EXPECT_FALSE(out_of_memory(std::runtime_error("index out of range")));
}

TEST(BufferTest, KeepsWhatItHasWhereItCannotGrow) {
  Buffer<std::int64_t> buffer;
  EXPECT_EQ(buffer.take(100).size(), 100u);
  volatile std::size_t too_many = std::numeric_limits<std::size_t>::max() / 4;
  EXPECT_THROW(buffer.take(too_many), std::bad_alloc);
  EXPECT_EQ(buffer.bytes(), 256 * sizeof(std::int64_t));
  EXPECT_EQ(buffer.take(257).size(), 257u);
  EXPECT_EQ(buffer.bytes(), 514 * sizeof(std::int64_t));
}

TEST_F(ExecutorTest, APartThatFailsFailsItsRequestOnce) {
  Request request(test::random_request(random, 9, 3));
  int pass = 0;
  runner.before = [&](const HostBatch&) {
    if (++pass == 2) throw std::runtime_error("once");
  };
  std::vector<Part> parts = parts_of(request, 3);
  ASSERT_EQ(parts.size(), 3u);
  for (const Part& part : parts) executor.execute({&part, 1});
  EXPECT_EQ(request.answers, 0);
  ASSERT_TRUE(request.refusal.has_value());
  EXPECT_TRUE(request.abandoned());
}

TEST_F(ExecutorTest, RefusesScoresOfAnotherSize) {
  class Short final : public test::MemorySession {
   public:
    Short() : MemorySession(test::schema()) {}

   private:
    std::unique_ptr<Scores> forward(const HostBatch&) override {
      return std::make_unique<PlainScores>(std::vector<float>{1});
    }
  } short_runner;
  Executor strict(schema, short_runner, clock, observer);
  Request request(test::random_request(random, 2, 3));
  const std::vector<Part> parts = parts_of(request);
  strict.execute(parts);
  ASSERT_TRUE(request.refusal.has_value());
  EXPECT_EQ(request.refusal->status.message,
            "failed: output 'default' has 1 numbers, the schema promises 2 samples by 1");
}

TEST_F(ExecutorTest, TimingsSayWhoSharedTheBatch) {
  Request a(test::random_request(random, 2, 3));
  Request b(test::random_request(random, 3, 3));
  std::vector<Part> batch = {parts_of(a)[0], parts_of(b)[0]};
  executor.execute(batch);
  EXPECT_EQ(a.timings.batch_requests, 2);
  EXPECT_EQ(a.timings.batch_samples, 5);
  EXPECT_EQ(observer.samples, (std::vector<std::int64_t>{5}));
}

}  // namespace
}  // namespace tessera
