// A version that follows its log, with a plain function in the model's place: what is taken, what
// is refused and why, what is taken back; and that no answer mixes two states.
#include <gtest/gtest.h>

#include <atomic>
#include <filesystem>
#include <functional>
#include <thread>

#include "batching/executor.h"
#include "follow/fence.h"
#include "follow_support.h"

namespace tessera {
namespace {

using test::CommitBytes;
using test::CommitSpec;
using test::FollowTest;
using test::kRows;
using test::Table;
using test::TableRunner;
using test::TableSession;

TEST_F(FollowTest, TakesCommitsInOrder) {
  EXPECT_EQ(followed->poll(), FollowedVersion::Outcome::kIdle);
  publish(1, 3, base);
  EXPECT_EQ(take_all(*followed), 3);
  expect_state(3);
  EXPECT_EQ(metrics.rows, 3 * kRows);
  EXPECT_EQ(metrics.newest_example(), 103.0);
  EXPECT_EQ(metrics.trouble(), "");
  EXPECT_EQ(followed->state().applied,
            (std::map<CommitNumber, std::string>{{1, hashes[1]}, {2, hashes[2]}, {3, hashes[3]}}));
}

TEST_F(FollowTest, WaitsForAMissingCommit) {
  publish(1, 3, base);
  std::filesystem::rename(folder + "/00000002.commit", folder + "/kept");
  EXPECT_EQ(take_all(*followed), 1);
  expect_state(1);
  EXPECT_EQ(followed->poll(), FollowedVersion::Outcome::kIdle);
  EXPECT_EQ(refused("gap"), 1u);
  EXPECT_EQ(metrics.trouble(), "commit 2: is missing, and later ones are there");
  std::filesystem::rename(folder + "/kept", folder + "/00000002.commit");
  EXPECT_EQ(take_all(*followed), 2);
  expect_state(3);
  EXPECT_EQ(metrics.trouble(), "");
}

TEST_F(FollowTest, RefusesWhatIsNotTheNextAndGoesOnWithTheRightFile) {
  const std::string first = publish(1, 1, base);
  take_all(*followed);
  using Change = std::function<void(CommitSpec&)>;
  const auto whole = test::commit_bytes(spec(2, first));
  const std::vector<std::tuple<std::string, std::string, Change>> cases = {
      {"base", "is for version 4 of model 'm'", [](auto& one) { one.version = 4; }},
      {"base", "is for the package", [](auto& one) { one.base = std::string(64, 'c'); }},
      {"chain", "builds on the commit", [](auto& one) { one.previous = std::string(64, 'c'); }},
      {"repeat", "holds commit 1, expected 2", [](auto& one) { one.number = 1; }},
      {"gap", "holds commit 3, expected 2", [](auto& one) { one.number = 3; }},
      {"schema", "the package has no 'data/7'",
       [](auto& one) { one.patches[1].record = "data/7"; }},
      {"schema", "reaches past the 256 bytes", [](auto& one) { one.patches[1].stride = 16; }},
      {"schema", "row 64 reaches past", [](auto& one) { one.patches[0].rows.back() = kRows; }},
      {"schema", "do not ascend",
       [](auto& one) { std::swap(one.patches[0].rows[0], one.patches[0].rows[1]); }},
      {"schema", "more than the stride", [](auto& one) { one.patches[1].stride = 3; }},
      {"golden", "does not give its golden answers",
       [](auto& one) { one.patches[0].bytes[1] = '\x7f'; }},
      {"golden", "cannot be read", [](auto& one) { one.golden = "none"; }},
  };
  std::map<std::string, std::uint64_t> counts;
  for (const auto& [reason, message, change] : cases) {
    CommitSpec wrong = spec(2, first);
    change(wrong);
    put(2, test::commit_bytes(wrong).file);
    EXPECT_EQ(take_all(*followed), 0);
    EXPECT_EQ(refused(reason), ++counts[reason]) << message;
    EXPECT_NE(metrics.trouble().find(message), std::string::npos) << metrics.trouble();
    expect_state(1);
    EXPECT_EQ(take_all(*followed), 0);
    EXPECT_EQ(refused(reason), counts[reason]) << "told once";
  }
  // Any byte that differs is noticed.
  for (std::size_t at = 0; at < whole.file.size(); at += 151) {
    std::string damaged = whole.file;
    damaged[at] = static_cast<char>(damaged[at] ^ 4);
    put(2, damaged);
    EXPECT_EQ(take_all(*followed), 0) << at;
    expect_state(1);
  }
  for (const std::size_t bytes : {std::size_t{0}, std::size_t{21}, whole.file.size() - 1}) {
    put(2, whole.file.substr(0, bytes));
    EXPECT_EQ(take_all(*followed), 0) << bytes;
    EXPECT_NE(metrics.trouble(), "");
  }
  EXPECT_GT(refused("damaged"), 0u);
  put(2, whole.file);
  EXPECT_EQ(take_all(*followed), 1);
  expect_state(2);
}

TEST_F(FollowTest, RefusesWhatNobodyTrustedHasSigned) {
  TableRunner other;
  CommitLock other_commits;
  const auto strict = open(other, other_commits, {.trusted = std::vector<PublicKey>(1)});
  publish(1, 1, base);
  EXPECT_EQ(take_all(*strict), 0);
  EXPECT_EQ(refused("unsigned"), 1u);
  EXPECT_EQ(metrics.trouble(),
            "commit 1: is not signed, and --require-signature is set; publish with --sign KEY.pem");
}

TEST_F(FollowTest, GoesBackToWhereTheFenceBegins) {
  publish(1, 5, base);
  take_all(*followed);
  write_fence(folder, {{3, hashes[3]}, {4, hashes[4]}, {5, hashes[5]}});
  EXPECT_EQ(followed->poll(), FollowedVersion::Outcome::kChanged);
  expect_state(2);
  EXPECT_EQ(metrics.newest_example(), 102.0);
  EXPECT_EQ(take_all(*followed), 0);
  // What builds on a fenced one is refused, and what builds on the state that stayed is taken.
  put(6, test::commit_bytes(spec(6, hashes[5])).file);
  EXPECT_EQ(take_all(*followed), 0);
  EXPECT_EQ(refused("fenced"), 1u);
  put(6, test::commit_bytes(spec(6, hashes[2])).file);
  EXPECT_EQ(take_all(*followed), 1);
  expect_state(6);
  write_fence(folder, {{1, ""}});
  EXPECT_EQ(followed->poll(), FollowedVersion::Outcome::kChanged);
  expect_state(0);
  EXPECT_EQ(metrics.newest_example(), std::nullopt);
}

TEST_F(FollowTest, AsksToBeLoadedAgainWhereTheUndoRecordIsGone) {
  publish(1, 3, base);
  take_all(*followed);
  const std::uint64_t each = undo.bytes() / 3;
  UndoRecords small(2 * each);
  TableRunner other;
  CommitLock other_commits;
  FollowMetrics other_metrics;
  FollowedVersion version(
      {.model = "m", .version = 3, .base = base, .sha256 = base}, folder,
      {.schema = schema, .runner = other, .commits = other_commits, .metrics = other_metrics}, {},
      small, clock, log);
  take_all(version);
  EXPECT_EQ(small.bytes(), 2 * each);
  EXPECT_FALSE(version.must_reload());
  write_fence(folder, {{3, ""}});
  EXPECT_FALSE(version.must_reload());
  EXPECT_EQ(version.poll(), FollowedVersion::Outcome::kChanged);
  EXPECT_EQ(version.state().number, 2);
  EXPECT_EQ(small.bytes(), each);
  write_fence(folder, {{1, ""}});
  EXPECT_TRUE(version.must_reload());
  EXPECT_EQ(version.poll(), FollowedVersion::Outcome::kReload);
  EXPECT_EQ(version.poll(), FollowedVersion::Outcome::kIdle);  // asked already
  EXPECT_EQ(version.state().number, 2);
  EXPECT_EQ(other.table.numbers, std::vector<float>(kRows, 2));
}

TEST_F(FollowTest, AFenceThatCannotBeReadStopsTheLog) {
  publish(1, 1, base);
  test::write_file(folder + "/fenced.json", "{}");
  EXPECT_EQ(take_all(*followed), 0);
  EXPECT_EQ(refused("fenced"), 1u);
  std::filesystem::remove(folder + "/fenced.json");
  EXPECT_EQ(take_all(*followed), 1);
  expect_state(1);
}

// Answers of one commit alone, and of the one that they name.
TEST_F(FollowTest, NoAnswerMixesTwoCommits) {
  class Answer final : public PendingRequest {
   public:
    std::vector<float> scores;
    std::int64_t named = -1;

   private:
    void answer(std::span<const OutputView> outputs, const StageTimings&) override {
      scores.assign(outputs[0].data, outputs[0].data + outputs[0].count);
      named = commit();
    }
    void fail(const Refusal& refusal) override { ADD_FAILURE() << refusal.status.message; }
  };
  class Observer final : public ExecutionObserver {
   public:
    void on_pass(const PassTimings&, Duration) override {}
    void on_scores(const Scores&, std::int64_t) override {}
    void on_retry(std::size_t, const std::string& error) override { ADD_FAILURE() << error; }
    Refusal on_failure(const std::exception& failure) override {
      ADD_FAILURE() << failure.what();
      return {};
    }
    std::vector<Part> cut_again(PendingRequest& request) override {
      return cut_request(request, 1, 3, 1'000'000);
    }
  };
  constexpr std::int64_t kCommits = 60;
  publish(1, kCommits, base);
  std::atomic<bool> done = false;
  std::atomic<int> wrong = 0;
  std::atomic<int> answers = 0;
  std::vector<std::jthread> workers;
  for (unsigned seed = 0; seed < 3; ++seed) {
    workers.emplace_back([&, seed] {
      test::Random random{seed};
      Observer observer;
      const SteadyClock steady;
      TableSession session(runner.table);
      Executor executor(schema, session, steady, observer, &commits);
      std::int64_t last = 0;
      while (!done) {
        const test::RequestData data = test::random_request(random, 8, 2);
        Answer request;
        if (!RequestDecoder(schema, {}).decode(data.view(), request.request).ok()) ++wrong;
        for (const Part& part : cut_request(request, 1, 3, 1'000'000)) {
          executor.execute({&part, 1});
        }
        for (std::size_t i = 0; i < request.scores.size(); ++i) {
          Table expected;
          expected.numbers.assign(kRows, static_cast<float>(request.named));
          if (request.scores[i] != expected.score(data.dense[2 * i])) ++wrong;
        }
        if (request.scores.size() != 8 || request.named < last) ++wrong;
        last = request.named;
        ++answers;
      }
    });
  }
  while (answers == 0) std::this_thread::yield();
  for (std::int64_t number = 1; number <= kCommits; ++number) {
    EXPECT_EQ(followed->poll(), FollowedVersion::Outcome::kChanged);
  }
  done = true;
  workers.clear();
  EXPECT_EQ(wrong, 0);
  expect_state(kCommits);
}

TEST(UndoRecordsTest, LetsTheOldestGoWhoeverTheyAreOf) {
  class Piece final : public StagedPatches {
   public:
    explicit Piece(std::uint64_t bytes) : bytes_(bytes) {}
    void swap() override {}
    std::uint64_t bytes() const override { return bytes_; }

   private:
    std::uint64_t bytes_;
  };
  UndoRecords undo(10);
  const int a = 0;
  const int b = 0;
  std::vector<std::weak_ptr<StagedPatches>> kept;
  const auto add = [&](const void* owner, std::uint64_t bytes) {
    auto piece = std::make_shared<Piece>(bytes);
    kept.emplace_back(piece);
    undo.add(owner, std::move(piece));
  };
  add(&a, 4);
  add(&b, 4);
  add(&a, 4);
  EXPECT_TRUE(kept[0].expired());
  EXPECT_EQ(undo.bytes(), 8u);
  undo.forget(static_cast<const void*>(&a));
  EXPECT_TRUE(kept[2].expired());
  EXPECT_FALSE(kept[1].expired());
  add(&a, 11);
  EXPECT_EQ(undo.bytes(), 0u);
}

}  // namespace
}  // namespace tessera
