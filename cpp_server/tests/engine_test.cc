// The C API over a plain function in the model's place: scores, refusals, bounds, threads, the end.
#include "engine/engine.h"

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <functional>
#include <future>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "echo_model.h"

namespace tessera {
namespace {

using Completion = tessera_engine_completion;

constexpr std::int64_t kPatienceUs = 120'000'000;

// Waits at each pass until it is let go on; the score of a row is its first dense feature.
class HeldRunner final : public Runner {
 public:
  HeldRunner(std::shared_future<void> go, std::atomic<int>& begun)
      : go_(std::move(go)), begun_(begun) {}
  std::vector<std::string> devices() const override { return {"cpu"}; }
  std::unique_ptr<Session> open_session(std::size_t) override {
    return std::make_unique<HeldSession>(*this);
  }
  std::vector<DeviceMemory> memory() const override { return {}; }

 private:
  class HeldSession final : public test::MemorySession {
   public:
    explicit HeldSession(HeldRunner& runner) : MemorySession(test::schema()), runner_(runner) {}
    std::unique_ptr<Scores> forward(const HostBatch& batch) override {
      ++runner_.begun_;
      runner_.go_.wait();
      return echo_.forward(batch);
    }

   private:
    HeldRunner& runner_;
    test::EchoSession echo_{0};
  };

  const std::shared_future<void> go_;
  std::atomic<int>& begun_;
};

// A request of test::schema()'s features with one id each, and the memory for its scores.
struct Sent {
  explicit Sent(std::int32_t samples, float first = 0) {
    test::Random random(static_cast<std::uint32_t>(samples));
    data = test::random_request(random, samples, 3);
    for (std::int32_t row = 0; row < samples; ++row) {
      data.dense[2 * static_cast<std::size_t>(row)] = first + static_cast<float>(row);
    }
    scores.assign(static_cast<std::size_t>(samples), -1);
    request.samples = samples;
    request.dense = data.dense.data();
    request.dense_count = data.dense.size();
    const bool narrow = !data.narrow.empty();
    request.id_list = {.lengths = data.lengths.data(),
                       .length_count = data.lengths.size(),
                       .values = narrow ? static_cast<const void*>(data.narrow.data())
                                        : static_cast<const void*>(data.values.data()),
                       .value_count = narrow ? data.narrow.size() : data.values.size(),
                       .weights = nullptr,
                       .weight_count = 0,
                       .value_bytes = narrow ? 4 : 8};
    request.id_score_list = {.lengths = data.scored_lengths.data(),
                             .length_count = data.scored_lengths.size(),
                             .values = data.scored_values.data(),
                             .value_count = data.scored_values.size(),
                             .weights = data.weights.data(),
                             .weight_count = data.weights.size(),
                             .value_bytes = 8};
  }

  std::int32_t submit(tessera_engine& engine, std::uint64_t tag) {
    return tessera_engine_submit(&engine, &request, scores.data(), scores.size(), tag,
                                 message.data(), message.size());
  }

  bool answered(float first) const {
    for (std::size_t row = 0; row < scores.size(); ++row) {
      if (scores[row] != first + static_cast<float>(row)) return false;
    }
    return true;
  }

  test::RequestData data;
  std::vector<float> scores;
  tessera_engine_request request{};
  std::array<char, 512> message{};
};

Completion next(tessera_engine& engine, std::int64_t timeout_us = kPatienceUs) {
  Completion completion{};
  EXPECT_EQ(tessera_engine_wait(&engine, &completion, 1, timeout_us), 1);
  return completion;
}

ServerConfig one_worker() {
  ServerConfig config;
  config.workers = 1;
  return config;
}

// An engine whose passes wait for `let_go`.
struct Held {
  explicit Held(const ServerConfig& config) : engine(package(), config) {}
  ~Held() { let_go(); }

  void let_go() {
    if (!std::exchange(went_, true)) go_.set_value();
  }
  void wait_for_passes(int count) const {
    while (begun_ < count) std::this_thread::yield();
  }

 private:
  LoadedPackage package() {
    LoadedPackage held = test::echo_package();
    held.runner = std::make_unique<HeldRunner>(go_.get_future().share(), begun_);
    return held;
  }

  std::promise<void> go_;
  std::atomic<int> begun_ = 0;
  bool went_ = false;

 public:
  tessera_engine engine;
};

TEST(EngineTest, ScoresComeWithTheirTags) {
  tessera_engine engine(test::echo_package(), one_worker());
  tessera_engine_facts facts{};
  tessera_engine_describe(&engine, &facts);
  EXPECT_EQ(facts.dense_features, 2);
  EXPECT_EQ(facts.id_list_features, 3);
  EXPECT_EQ(facts.id_score_list_features, 1);
  EXPECT_EQ(facts.outputs, 1);
  EXPECT_EQ(facts.scores_per_sample, 1);
  std::int64_t width = 0;
  EXPECT_STREQ(tessera_engine_output(&engine, 0, &width), "default");
  EXPECT_EQ(width, 1);
  EXPECT_EQ(tessera_engine_output(&engine, 1, &width), nullptr);
  // One is larger than a batch.
  for (const std::int32_t samples : {1, 3, 512, 1'500}) {
    Sent sent(samples, 7);
    ASSERT_EQ(sent.submit(engine, 40 + static_cast<std::uint64_t>(samples)), TESSERA_ENGINE_OK);
    const Completion completion = next(engine);
    EXPECT_EQ(completion.tag, 40 + static_cast<std::uint64_t>(samples));
    EXPECT_EQ(completion.code, TESSERA_ENGINE_OK);
    EXPECT_STREQ(completion.message, "");
    EXPECT_TRUE(sent.answered(7)) << samples;
  }
}

TEST(EngineTest, ManyThreadsSubmitAndWait) {
  constexpr int kThreads = 4;
  constexpr int kEach = 200;
  tessera_engine engine(test::echo_package(), ServerConfig{});
  std::vector<std::unique_ptr<Sent>> sent;
  sent.reserve(kThreads * kEach);
  for (int i = 0; i < kThreads * kEach; ++i) {
    sent.push_back(std::make_unique<Sent>(1 + i % 9, static_cast<float>(i)));
  }
  std::atomic<int> refused = 0;
  std::array<std::vector<Completion>, kThreads> taken;
  {
    std::vector<std::jthread> threads;
    for (int t = 0; t < kThreads; ++t) {
      threads.emplace_back([&, t] {
        for (int i = t * kEach; i < (t + 1) * kEach; ++i) {
          const auto at = static_cast<std::size_t>(i);
          refused += sent[at]->submit(engine, at) == TESSERA_ENGINE_OK ? 0 : 1;
        }
      });
      threads.emplace_back([&, t] {
        std::array<Completion, 16> lot{};
        while (true) {
          const std::int64_t count = tessera_engine_wait(&engine, lot.data(), lot.size(), -1);
          if (count < 0) return;
          auto& mine = taken[static_cast<std::size_t>(t)];
          mine.insert(mine.end(), lot.begin(), lot.begin() + count);
        }
      });
    }
    for (std::size_t t = 0; t < threads.size(); t += 2) threads[t].join();
    tessera_engine_close(&engine);
  }
  EXPECT_EQ(refused, 0);
  std::set<std::uint64_t> tags;
  for (const auto& some : taken) {
    for (const Completion& completion : some) {
      EXPECT_EQ(completion.code, TESSERA_ENGINE_OK) << completion.message;
      EXPECT_TRUE(sent[completion.tag]->answered(static_cast<float>(completion.tag)));
      EXPECT_TRUE(tags.insert(completion.tag).second);
    }
  }
  EXPECT_EQ(tags.size(), sent.size());
}

TEST(EngineTest, WhatIsWrongWithARequestIsNamed) {
  tessera_engine engine(test::echo_package(), one_worker());
  const auto refusal = [&](const std::function<void(Sent&)>& spoil) {
    Sent sent(2);
    spoil(sent);
    EXPECT_EQ(sent.submit(engine, 1), TESSERA_ENGINE_INVALID_ARGUMENT);
    return std::string(sent.message.data());
  };
  EXPECT_EQ(refusal([](Sent& sent) { sent.request.dense = nullptr; }),
            "dense is null, expected 4 numbers");
  EXPECT_EQ(refusal([](Sent& sent) { sent.request.id_list.value_bytes = 3; }),
            "id_list.value_bytes is 3, expected 4 (int32) or 8 (int64)");
  EXPECT_EQ(refusal([](Sent& sent) { sent.request.timeout_us = -1; }),
            "timeout_us is -1, expected 0 (no limit) or more");
  EXPECT_EQ(refusal([](Sent& sent) { sent.scores.resize(3); }),
            "scores has room for 3 numbers, expected 1 for each of 2 samples");
  EXPECT_EQ(refusal([](Sent& sent) { sent.request.samples = 0; }),
            "batch_size is 0, expected at least 1");
  EXPECT_EQ(refusal([](Sent& sent) { sent.data.lengths[0] = -1; }),
            "id_list_features.lengths[0] is -1, expected >= 0");
  EXPECT_NE(refusal([](Sent& sent) {
              --sent.request.id_list.length_count;
            }).find("id_list_features.lengths has 20 bytes, expected 24"),
            std::string::npos);
  Completion completion{};
  EXPECT_EQ(tessera_engine_wait(&engine, &completion, 1, 0), 0);
}

TEST(EngineTest, ManyRequestsOfOneCallAreTakenUpToTheFirstThatIsRefused) {
  constexpr std::size_t kMany = 100;  // several turns at the queue
  constexpr std::size_t kBad = 70;
  tessera_engine engine(test::echo_package(), one_worker());
  std::vector<Sent> sent;
  std::vector<tessera_engine_submission> lot;
  sent.reserve(kMany);
  for (std::size_t i = 0; i < kMany; ++i) {
    Sent& one = sent.emplace_back(static_cast<std::int32_t>(1 + i % 5), static_cast<float>(i));
    lot.push_back({.request = &one.request,
                   .scores = one.scores.data(),
                   .score_count = one.scores.size(),
                   .tag = i});
  }
  std::array<char, 512> message{};
  std::int32_t code = -1;
  const auto submit = [&](std::size_t first) {
    return tessera_engine_submit_many(&engine, lot.data() + first, kMany - first, &code,
                                      message.data(), message.size());
  };
  sent[kBad].request.timeout_us = -1;
  EXPECT_EQ(submit(0), kBad);
  EXPECT_EQ(code, TESSERA_ENGINE_INVALID_ARGUMENT);
  EXPECT_STREQ(message.data(), "timeout_us is -1, expected 0 (no limit) or more");
  EXPECT_EQ(submit(kBad + 1), kMany - kBad - 1);
  EXPECT_EQ(code, TESSERA_ENGINE_OK);
  EXPECT_STREQ(message.data(), "");
  std::set<std::uint64_t> tags;
  while (tags.size() < kMany - 1) {
    const Completion completion = next(engine);
    ASSERT_EQ(completion.code, TESSERA_ENGINE_OK) << completion.message;
    EXPECT_TRUE(sent[completion.tag].answered(static_cast<float>(completion.tag)));
    EXPECT_TRUE(tags.insert(completion.tag).second);
  }
  EXPECT_EQ(tags.count(kBad), 0U);
  tessera_engine_close(&engine);
  EXPECT_EQ(submit(0), 0U);
  EXPECT_EQ(code, TESSERA_ENGINE_UNAVAILABLE);
}

TEST(EngineTest, CloseComputesWhatWasTaken) {
  Held held(one_worker());
  Sent first(1, 5);
  Sent second(2, 6);
  ASSERT_EQ(first.submit(held.engine, 1), TESSERA_ENGINE_OK);
  ASSERT_EQ(second.submit(held.engine, 2), TESSERA_ENGINE_OK);
  held.wait_for_passes(1);
  std::thread closes([&] { tessera_engine_close(&held.engine); });
  // The close shuts the door at once, and has not ended while a pass is held.
  Sent late(1);
  std::int32_t code = TESSERA_ENGINE_OK;
  std::uint64_t tags = 2;  // of all requests that came before the close did
  while (code != TESSERA_ENGINE_UNAVAILABLE) {
    code = late.submit(held.engine, tags + 1);
    if (code == TESSERA_ENGINE_OK) ++tags;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_STREQ(late.message.data(), "the engine is closed");
  held.let_go();
  closes.join();
  for (std::uint64_t tag = 1; tag <= tags; ++tag) {
    // Where the close came very late, the queue was full.
    const Completion completion = next(held.engine);
    if (completion.tag < 3) {
      EXPECT_EQ(completion.code, TESSERA_ENGINE_OK);
    }
  }
  EXPECT_TRUE(first.answered(5));
  EXPECT_TRUE(second.answered(6));
  Completion completion{};
  EXPECT_EQ(tessera_engine_wait(&held.engine, &completion, 1, -1), -1);
  tessera_engine_close(&held.engine);
}

TEST(EngineTest, CompletionsThatNobodyTakesKeepTheirRoom) {
  ServerConfig config = one_worker();
  config.max_inflight_bytes = 40'000;  // two calls of 16 KiB and something
  tessera_engine engine(test::echo_package(), config);
  Sent sent(1);
  ASSERT_EQ(sent.submit(engine, 1), TESSERA_ENGINE_OK);
  ASSERT_EQ(sent.submit(engine, 2), TESSERA_ENGINE_OK);
  EXPECT_EQ(sent.submit(engine, 3), TESSERA_ENGINE_RESOURCE_EXHAUSTED);
  EXPECT_EQ(std::string(sent.message.data()).find("the engine is full: requests in it take "), 0U);
  next(engine);
  EXPECT_EQ(sent.submit(engine, 3), TESSERA_ENGINE_OK);
  Sent large(400);
  EXPECT_EQ(large.submit(engine, 4), TESSERA_ENGINE_INVALID_ARGUMENT);
  tessera_engine_close(&engine);  // before the arrays end
}

TEST(EngineTest, AFullQueueAndALateRequestEndWithTheirCodes) {
  ServerConfig config = one_worker();
  config.queue_limits.max_requests = 1;
  Held held(config);
  Sent first(1);
  ASSERT_EQ(first.submit(held.engine, 1), TESSERA_ENGINE_OK);
  held.wait_for_passes(1);
  Sent late(1);
  late.request.timeout_us = 1;
  ASSERT_EQ(late.submit(held.engine, 2), TESSERA_ENGINE_OK);
  // It takes the place of the one whose time is over, or finds it gone already.
  std::this_thread::sleep_for(std::chrono::milliseconds(2));
  Sent waits(1);
  ASSERT_EQ(waits.submit(held.engine, 3), TESSERA_ENGINE_OK);
  Completion completion = next(held.engine);
  EXPECT_EQ(completion.tag, 2U);
  EXPECT_EQ(completion.code, TESSERA_ENGINE_DEADLINE_EXCEEDED);
  Sent beyond(1);
  ASSERT_EQ(beyond.submit(held.engine, 4), TESSERA_ENGINE_OK);
  completion = next(held.engine);
  EXPECT_EQ(completion.tag, 4U);
  EXPECT_EQ(completion.code, TESSERA_ENGINE_RESOURCE_EXHAUSTED);
  EXPECT_EQ(std::string(completion.message).find("the queue is full: 1 requests"), 0U);
  held.let_go();
  tessera_engine_close(&held.engine);  // before the arrays end
}

TEST(EngineTest, FlagsAreThoseOfTheServerThatMeanSomethingHere) {
  const ServerConfig config =
      engine_config("a=b/m.pt", {"--workers=3", "--max-batch-samples=64", "--skip-golden"});
  EXPECT_EQ(config.workers, 3);
  EXPECT_EQ(config.batch_limits.max_samples, 64);
  EXPECT_FALSE(config.verify_golden);
  EXPECT_TRUE(config.models.front().path.ends_with("/a=b/m.pt"));
  EXPECT_TRUE(config.models.front().name.empty());
  const auto refusal = [](const std::string& word) -> std::string {
    try {
      engine_config("m.pt", {word});
    } catch (const UsageError& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_EQ(refusal("--port=1"), "--port: is not a flag of the engine; docs/engine.md lists them");
  EXPECT_EQ(refusal("--worker=1"),
            "--worker: is not a flag of the engine; did you mean --workers?");
  EXPECT_EQ(refusal("workers"), "'workers' is not a flag; give --NAME=VALUE or --NAME");
  EXPECT_NE(refusal("--workers=0").find("--workers"), std::string::npos);
}

TEST(EngineTest, TextsAreCutBetweenCharacters) {
  std::array<char, 4> out{};
  copy_text("abc", out);
  EXPECT_STREQ(out.data(), "abc");
  copy_text("ab\xC3\xA9", out);
  EXPECT_STREQ(out.data(), "ab");
  copy_text("\xE2\x82\xAC\xE2\x82\xAC", out);
  EXPECT_STREQ(out.data(), "\xE2\x82\xAC");
  copy_text("x", {});
}

}  // namespace
}  // namespace tessera
