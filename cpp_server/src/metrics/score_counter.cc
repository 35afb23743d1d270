#include "metrics/score_counter.h"

#include <cmath>
#include <span>

namespace tessera {

ScoreCounter::ScoreCounter(const std::vector<OutputSpec>& outputs) {
  for (std::size_t place = 0; place < outputs.size(); ++place) {
    if (outputs[place].width == 1) outputs_.emplace_back(outputs[place].name, place);
  }
}

void ScoreCounter::count(const Scores& scores, std::int64_t samples) {
  for (Output& output : outputs_) {
    std::array<std::uint64_t, kScoreBuckets.size() + 1> counts{};
    std::uint64_t not_finite = 0;
    double sum = 0;
    for (const float score : scores.output(output.place).first(static_cast<std::size_t>(samples))) {
      if (!std::isfinite(score)) {
        ++not_finite;
        continue;
      }
      ++counts[output.scores.bucket_of(score)];
      sum += score;
    }
    output.scores.add(counts, sum);
    if (not_finite != 0) output.not_finite.fetch_add(not_finite, std::memory_order_relaxed);
  }
}

}  // namespace tessera
