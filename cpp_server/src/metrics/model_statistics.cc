#include "metrics/model_statistics.h"

#include <cmath>
#include <initializer_list>
#include <numeric>

namespace tessera {
namespace {

std::uint64_t observations(const Histogram& histogram) {
  const std::vector<std::uint64_t> counts = histogram.counts();
  return std::accumulate(counts.begin(), counts.end(), std::uint64_t{0});
}

std::uint64_t ns_of(const ModelMetrics& model, std::initializer_list<Stage> stages) {
  double seconds = 0;
  for (const Stage stage : stages) seconds += model.stages[static_cast<std::size_t>(stage)].sum();
  return static_cast<std::uint64_t>(std::llround(seconds * 1e9));
}

std::uint64_t last_inference_ms(const ModelMetrics& model, TimePoint now,
                                std::chrono::system_clock::time_point now_of_day) {
  const std::int64_t last = model.last_answer_ns();
  if (last == 0) return 0;
  const Duration ago = now.time_since_epoch() - std::chrono::nanoseconds(last);
  const auto when =
      std::chrono::floor<std::chrono::milliseconds>(now_of_day.time_since_epoch() - ago);
  return static_cast<std::uint64_t>(when.count());
}

}  // namespace

ModelStatistics statistics_of(const ModelMetrics& model, TimePoint now,
                              std::chrono::system_clock::time_point now_of_day) {
  ModelStatistics made;
  made.last_inference_ms = last_inference_ms(model, now, now_of_day);
  made.samples = model.answered_samples();
  made.batches = observations(model.batch_samples);
  for (std::size_t i = 0; i < kCountedCodes.size(); ++i) {
    CountedTime& calls = kCountedCodes[i] == Code::kOk ? made.success : made.fail;
    calls.count += model.requests(i);
  }
  made.success.ns = model.answered_ns();
  made.fail.ns = model.failed_ns();
  made.queue = {observations(model.stages[static_cast<std::size_t>(Stage::kQueue)]),
                ns_of(model, {Stage::kQueue})};
  made.compute_input = {made.batches,
                        ns_of(model, {Stage::kDecode, Stage::kAssemble, Stage::kTransfer})};
  made.compute_infer = {made.batches, ns_of(model, {Stage::kForward})};
  made.compute_output = {made.batches, ns_of(model, {Stage::kSplit, Stage::kEncode})};
  return made;
}

}  // namespace tessera
