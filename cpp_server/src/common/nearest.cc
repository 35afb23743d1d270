#include "common/nearest.h"

#include <algorithm>
#include <cstddef>
#include <numeric>

namespace tessera {

// Three rows of the table of distances between beginnings of `a` and of `b`: a swap looks two back.
std::size_t edits(std::string_view a, std::string_view b) {
  std::vector<std::size_t> older(b.size() + 1), before(b.size() + 1), row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 0; i < a.size(); ++i) {
    older.swap(before);
    before.swap(row);
    row[0] = i + 1;
    for (std::size_t j = 0; j < b.size(); ++j) {
      const std::size_t replaced = before[j] + (a[i] == b[j] ? 0 : 1);
      row[j + 1] = std::min({replaced, row[j] + 1, before[j + 1] + 1});
      const bool swapped = i > 0 && j > 0 && a[i] == b[j - 1] && a[i - 1] == b[j];
      if (swapped) row[j + 1] = std::min(row[j + 1], older[j - 1] + 1);
    }
  }
  return row.back();
}

std::string nearest(std::string_view name, const std::vector<std::string>& known) {
  std::string found;
  std::size_t fewest = 0;
  for (const std::string& candidate : known) {
    const std::size_t longer = std::max(name.size(), candidate.size());
    if (longer > 2 * candidate.size() + 1) continue;  // nothing like it, however long it is
    const std::size_t distance = edits(name, candidate);
    if (3 * distance > longer || (!found.empty() && distance >= fewest)) continue;
    found = candidate;
    fewest = distance;
  }
  return found;
}

}  // namespace tessera
