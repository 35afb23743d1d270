// Rows laid over those of a table, with a plain loop in the place of the lookup: what it reads
// beside the writing is one state, whole.
#include "csrc/row_overlay.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <numeric>
#include <stop_token>
#include <thread>
#include <vector>

#include "common/reader_writer_lock.h"
#include "csrc/cpu_kernels.h"

namespace tessera {
namespace {

constexpr std::int64_t kRows = 20'000;
constexpr std::int64_t kDim = 4;
constexpr std::int64_t kBytes = kDim * sizeof(float);

// A table of float32, and the plan of a feature over it.
struct Table {
  std::vector<float> numbers = std::vector<float>(kRows * kDim, 0);
  FeaturePlan plan{};

  Table() {
    plan.rows = kRows;
    plan.dim = kDim;
    plan.row_stride = kBytes;
    plan.weight_type = kFloat32;
    plan.scale_type = kNoScale;
  }

  std::byte* bytes() { return reinterpret_cast<std::byte*>(numbers.data()); }
  const std::uint8_t* weights() const {
    return reinterpret_cast<const std::uint8_t*>(numbers.data());
  }

  // The first number of each of `ids`.
  std::vector<float> look_up(const std::vector<std::int64_t>& ids) const {
    std::vector<std::int64_t> rows = ids;
    std::vector<std::int64_t> starts(rows.size());
    std::transform(rows.begin(), rows.end(), starts.begin(),
                   [](std::int64_t row) { return row * kBytes; });
    if (const LaidStorage* const laid = laid_over(weights())) {
      laid->lay(weights(), plan, 0, static_cast<std::int64_t>(rows.size()), rows.data(),
                starts.data());
    }
    std::vector<float> found(ids.size());
    for (std::size_t i = 0; i < ids.size(); ++i) {
      std::memcpy(&found[i], weights() + starts[i], sizeof(float));
    }
    return found;
  }
};

// New bytes for every second row, all of `value`.
struct Commit {
  std::vector<float> values;
  std::vector<std::uint32_t> numbers;

  explicit Commit(float value) : values(kRows / 2 * kDim, value), numbers(kRows / 2) {
    for (std::size_t i = 0; i < numbers.size(); ++i) {
      numbers[i] = static_cast<std::uint32_t>(2 * i);
    }
  }

  std::vector<NewRows> rows(Table& table) {
    std::vector<NewRows> made;
    made.push_back({.storage = table.bytes(),
                    .storage_bytes = table.numbers.size() * sizeof(float),
                    .table = table.bytes(),
                    .stride = kBytes,
                    .width = kBytes,
                    .numbers = numbers,
                    .values = reinterpret_cast<std::byte*>(values.data())});
    return made;
  }
};

// Three threads that pass after pass look up ids of their own, until they are destroyed.
class Readers {
 public:
  using Pass = std::function<void(const std::vector<std::int64_t>& ids)>;

  explicit Readers(const Pass& pass) {
    for (int reader = 0; reader < 3; ++reader) {
      threads_.emplace_back([this, pass, reader](const std::stop_token& stop) {
        std::vector<std::int64_t> ids(200);
        std::iota(ids.begin(), ids.end(), 6'000 * reader);
        while (!stop.stop_requested()) {
          pass(ids);
          ++passes_;
        }
      });
    }
  }

  void wait_for_another_pass() const {
    const int before = passes_;
    while (passes_ == before) std::this_thread::yield();
  }

 private:
  std::atomic<int> passes_ = 0;
  std::vector<std::jthread> threads_;
};

// Even rows hold `value`, the others nothing.
void expect_state(const Table& table, const std::vector<std::int64_t>& ids, float value) {
  const std::vector<float> found = table.look_up(ids);
  for (std::size_t i = 0; i < ids.size(); ++i) {
    ASSERT_EQ(found[i], ids[i] % 2 == 0 ? value : 0) << ids[i];
  }
}

TEST(RowOverlayTest, LookupsBesideTheWritingReadOneState) {
  Table table;
  ReaderWriterLock lock;
  float state = 0;  // of even rows, under the lock
  const Readers readers([&](const std::vector<std::int64_t>& ids) {
    const SharedHold hold(&lock);
    expect_state(table, ids, state);
  });
  for (int number = 1; number <= 20; ++number) {
    Commit commit(static_cast<float>(number));
    auto overlay = std::make_unique<RowOverlay>(commit.rows(table));
    while (overlay->keep()) {
    }
    {
      const ExclusiveHold hold(lock);
      overlay->show();
      state = static_cast<float>(number);
    }
    while (overlay->write()) std::this_thread::yield();
    const ExclusiveHold those_that_had_begun(lock);
    overlay.reset();
    EXPECT_EQ(commit.values[0], static_cast<float>(number - 1));
  }
  readers.wait_for_another_pass();
}

TEST(RowOverlayTest, APlanThatDoesNotFitHasTheRowsWrittenFirst) {
  Table table;
  Table other = table;
  Commit commit(5);
  RowOverlay overlay(commit.rows(table));
  while (overlay.keep()) {
  }
  overlay.show();
  table.plan.row_stride = 2 * kBytes;  // every second row
  table.plan.rows = kRows / 2;
  std::vector<std::int64_t> rows = {3};
  std::vector<std::int64_t> starts = {3 * 2 * kBytes};
  laid_over(table.weights())->lay(table.weights(), table.plan, 0, 1, rows.data(), starts.data());
  EXPECT_EQ(rows[0], 3);
  EXPECT_EQ(table.numbers[6 * kDim], 5);
  EXPECT_EQ(laid_over(other.weights()), nullptr);
  overlay.take_back();
  EXPECT_EQ(table.numbers[6 * kDim], 0);
  EXPECT_EQ(laid_over(table.weights()), nullptr);
}

// A pass says what it looks up to, and commits come without stopping any: each pass counts itself
// under the overlay of its state, and rows are written once no pass of the state before runs.
TEST(RowOverlayTest, PassesOfTwoStatesRunBesideEachOther) {
  Table table;
  struct State {
    std::int64_t overlay = 0;
    float value = 0;
    std::atomic<int> passes = 0;
  };
  std::vector<std::unique_ptr<State>> states;
  states.push_back(std::make_unique<State>());
  std::mutex mutex;
  State* now = states.back().get();  // under the mutex, as is who begins
  const Readers readers([&](const std::vector<std::int64_t>& ids) {
    State* state = nullptr;
    {
      const std::lock_guard lock(mutex);
      state = now;
      ++state->passes;
    }
    look_up_to(state->overlay);
    for (int lookup = 0; lookup < 2; ++lookup) expect_state(table, ids, state->value);
    --state->passes;
  });
  const auto wait_for = [](const State& state) {
    while (state.passes > 0) std::this_thread::yield();
  };
  for (int number = 1; number <= 20; ++number) {
    Commit commit(static_cast<float>(number));
    auto overlay = std::make_unique<RowOverlay>(commit.rows(table));
    while (overlay->keep()) {
    }
    overlay->show(Shows::kBeside);
    EXPECT_EQ(table.look_up({0}).front(), static_cast<float>(number));  // this thread sees all
    State* const before = now;
    states.push_back(std::make_unique<State>());
    states.back()->overlay = overlay->number();
    states.back()->value = static_cast<float>(number);
    {
      const std::lock_guard lock(mutex);
      now = states.back().get();
    }
    wait_for(*before);
    while (overlay->write()) std::this_thread::yield();
    EXPECT_TRUE(overlay->fits());
    // A pass that began before the last row was written may still read the overlay.
    State* const same = now;
    states.push_back(std::make_unique<State>());
    states.back()->overlay = same->overlay;
    states.back()->value = same->value;
    {
      const std::lock_guard lock(mutex);
      now = states.back().get();
    }
    wait_for(*same);
    overlay.reset();
  }
  readers.wait_for_another_pass();
}

}  // namespace
}  // namespace tessera
