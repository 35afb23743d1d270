#include "metrics/model_statistics.h"

#include <gtest/gtest.h>

namespace tessera {
namespace {

using namespace std::chrono_literals;

TEST(Statistics, AreThoseOfTheCounters) {
  ModelMetrics metrics{"m", "1"};
  const TimePoint start{1'000s};
  const std::chrono::system_clock::time_point day{1'700'000'000s};
  const ModelStatistics none = statistics_of(metrics, start, day);
  EXPECT_EQ(none.last_inference_ms, 0u);
  EXPECT_EQ(none.success.count + none.fail.count + none.batches + none.queue.ns, 0u);

  for (int i = 0; i < 3; ++i) metrics.count_request(Code::kOk, 2ms);
  metrics.count_answered(7, start);
  metrics.count_answered(4, start + 250ms);
  metrics.count_request(Code::kCancelled, 5ms);
  metrics.count_request(Code::kInvalidArgument, 1us);
  metrics.observe_stage(Stage::kQueue, 0.25);
  metrics.observe_stage(Stage::kDecode, 0.5);
  metrics.observe_stage(Stage::kEncode, 1);
  for (int i = 0; i < 2; ++i) {
    metrics.observe_pass({.assemble = 10ms, .transfer = 20ms, .forward = 30ms, .samples = 5}, 40ms);
  }
  const ModelStatistics made = statistics_of(metrics, start + 1s, day);
  EXPECT_EQ(made.last_inference_ms, 1'699'999'999'250u);
  EXPECT_EQ(made.samples, 11u);
  EXPECT_EQ(made.batches, 2u);
  EXPECT_EQ(made.success.count, 3u);
  EXPECT_EQ(made.success.ns, 6'000'000u);
  EXPECT_EQ(made.fail.count, 2u);
  EXPECT_EQ(made.fail.ns, 5'001'000u);
  EXPECT_EQ(made.queue.count, 1u);
  EXPECT_EQ(made.queue.ns, 250'000'000u);
  EXPECT_EQ(made.compute_input.count, 2u);
  EXPECT_EQ(made.compute_input.ns, 560'000'000u);
  EXPECT_EQ(made.compute_infer.count, 2u);
  EXPECT_EQ(made.compute_infer.ns, 60'000'000u);
  EXPECT_EQ(made.compute_output.count, 2u);
  EXPECT_EQ(made.compute_output.ns, 1'080'000'000u);
}

}  // namespace
}  // namespace tessera
