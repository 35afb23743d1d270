#include "metrics/histogram.h"

#include <limits>
#include <numeric>

namespace tessera {

double quantile(std::span<const double> bounds, std::span<const std::uint64_t> counts,
                double fraction) {
  const auto total =
      static_cast<double>(std::accumulate(counts.begin(), counts.end(), std::uint64_t{0}));
  if (total == 0) return std::numeric_limits<double>::quiet_NaN();
  const double rank = fraction * total;
  double below = 0;
  double lower = 0;
  for (std::size_t i = 0; i < bounds.size(); ++i) {
    const auto count = static_cast<double>(counts[i]);
    if (count > 0 && below + count >= rank) {
      return lower + (bounds[i] - lower) * (rank - below) / count;
    }
    below += count;
    lower = bounds[i];
  }
  return lower;
}

}  // namespace tessera
