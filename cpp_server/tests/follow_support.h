// A version that follows its log, for tests: a plain function in the model's place.
#pragma once

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "commit_files.h"
#include "echo_model.h"
#include "follow/followed_version.h"
#include "model/weights.h"

namespace tessera::test {

inline constexpr std::size_t kRows = 64;

// A table of kRows numbers; the score of a sample is their sum, and its first dense feature.
struct Table {
  std::vector<float> numbers = std::vector<float>(kRows, 0);

  float score(float dense) const {
    float sum = dense;
    for (const float number : numbers) sum += number;
    return sum;
  }
  HostWeights::Places places() { return {{"data/0", std::as_writable_bytes(std::span(numbers))}}; }
};

class TableSession final : public MemorySession {
 public:
  explicit TableSession(const Table& table, std::function<void()> before_forward = nullptr)
      : MemorySession(schema()), table_(table), before_forward_(std::move(before_forward)) {}

  std::unique_ptr<Scores> forward(const HostBatch& batch) override {
    if (before_forward_ != nullptr) before_forward_();
    class Sums final : public Scores {
     public:
      std::vector<float> values;
      std::span<const float> output(std::size_t) const override { return values; }
    };
    auto scores = std::make_unique<Sums>();
    for (std::size_t row = 0; row < static_cast<std::size_t>(batch.samples); ++row) {
      scores->values.push_back(table_.score(batch.dense[2 * row]));
    }
    return scores;
  }

 private:
  const Table& table_;
  const std::function<void()> before_forward_;
};

class TableRunner final : public Runner {
 public:
  std::vector<std::string> devices() const override { return {"cpu"}; }
  std::unique_ptr<Session> open_session(std::size_t) override {
    return std::make_unique<TableSession>(table, [this] {
      if (before_forward != nullptr) before_forward();
    });
  }
  std::vector<DeviceMemory> memory() const override { return {}; }
  Weights* weights() const override { return &own_; }

  Table table;
  std::function<void()> before_forward;  // may throw
  std::function<void()> before_swap;     // likewise
  std::function<void()> before_stage;    // likewise

 private:
  // HostWeights, of which every exchange may fail.
  class Faulty final : public Weights {
   public:
    explicit Faulty(TableRunner& runner) : runner_(runner) {}
    std::optional<std::uint64_t> bytes(const std::string& record) const override {
      return own_.bytes(record);
    }
    bool on_host() const override { return true; }
    std::unique_ptr<StagedPatches> stage(std::vector<Patch> patches, Beside beside,
                                         const std::function<void()>& between) override {
      class Staged final : public StagedPatches {
       public:
        Staged(TableRunner& runner, std::unique_ptr<StagedPatches> own)
            : runner_(runner), own_(std::move(own)) {}
        void swap() override {
          if (runner_.before_swap != nullptr) runner_.before_swap();
          own_->swap();
        }
        std::uint64_t bytes() const override { return own_->bytes(); }

       private:
        TableRunner& runner_;
        const std::unique_ptr<StagedPatches> own_;
      };
      if (runner_.before_stage != nullptr) runner_.before_stage();
      between();
      return std::make_unique<Staged>(runner_, own_.stage(std::move(patches), beside, between));
    }

   private:
    TableRunner& runner_;
    HostWeights own_{runner_.table.places()};
  };
  mutable Faulty own_{*this};
};

struct FollowTest : testing::Test {
  FollowTest() { std::filesystem::create_directories(folder); }
  ~FollowTest() override { std::filesystem::remove_all(folder); }

  std::unique_ptr<FollowedVersion> open(TableRunner& served, CommitLock& its_commits,
                                        FollowedVersion::Options options = {}) {
    auto version = std::make_unique<FollowedVersion>(
        LogState{.model = "m", .version = 3, .base = base, .sha256 = base}, folder,
        FollowedVersion::Model{
            .schema = schema, .runner = served, .commits = its_commits, .metrics = metrics},
        std::move(options), undo, clock, log);
    version->set_shown(true);
    return version;
  }

  // A commit after which all rows have the value `number`, in two patches.
  CommitSpec spec(std::int64_t number, const std::string& previous) const {
    const auto value = static_cast<float>(number);
    std::vector<std::uint32_t> odd;
    for (std::uint32_t row = 0; row < kRows / 2; ++row) odd.push_back(2 * row + 1);
    const std::vector<float> half(kRows / 2, value);
    return {.number = number,
            .base = base,
            .previous = previous,
            .newest_example_s = 100.0 + value,
            .patches = {{.rows = odd, .bytes = raw(half)}, {.stride = 8, .bytes = raw(half)}},
            .golden = golden_file(0.5F, 0.5F + value * kRows)};
  }

  void put(std::int64_t number, const std::string& content) const {
    // Moved in, so that the file is another one than before.
    const std::string path = folder + "/" + commit_name(number);
    write_file(path + ".partial", content);
    std::filesystem::rename(path + ".partial", path);
  }

  // Writes commits `first` to `last`; gives the hash of the last one.
  std::string publish(std::int64_t first, std::int64_t last, std::string previous) {
    for (std::int64_t number = first; number <= last; ++number) {
      const CommitBytes bytes = commit_bytes(spec(number, previous));
      put(number, bytes.file);
      previous = bytes.sha256;
      hashes[number] = previous;
    }
    return previous;
  }

  static int take_all(FollowedVersion& version) {
    int taken = 0;
    while (version.poll() == FollowedVersion::Outcome::kChanged) ++taken;
    return taken;
  }

  void expect_state(std::int64_t number) {
    EXPECT_EQ(followed->state().number, number);
    EXPECT_EQ(commits.commit, number);
    EXPECT_EQ(metrics.commit, number);
    EXPECT_EQ(runner.table.numbers, std::vector<float>(kRows, static_cast<float>(number)));
  }

  // How often `reason` was counted.
  std::uint64_t refused(std::string_view reason) const {
    for (std::size_t i = 0; i < kCommitRefusals.size(); ++i) {
      if (kCommitRefusals[i] == reason) return metrics.refused[i];
    }
    ADD_FAILURE() << reason;
    return 0;
  }

  const InputSchema schema = test::schema();
  const std::string base = std::string(64, 'b');
  const std::string folder =
      (std::filesystem::temp_directory_path() / ("follow-" + std::to_string(::getpid()))).string();
  FakeClock clock;
  Log log{LogLevel::kError, true};
  UndoRecords undo{1U << 20};
  FollowMetrics metrics;
  TableRunner runner;
  CommitLock commits;
  std::map<std::int64_t, std::string> hashes;
  std::unique_ptr<FollowedVersion> followed = open(runner, commits);
};

}  // namespace tessera::test
