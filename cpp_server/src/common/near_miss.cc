#include "common/near_miss.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "common/text.h"

namespace tessera {
namespace {

// Nobody mistypes a name as a longer text than this, so those are not compared.
constexpr std::size_t kLongest = 64;

std::size_t distance(std::string_view a, std::string_view b) {
  // Row i holds the distances of a's first i bytes from each beginning of b.
  std::vector<std::size_t> before_last(b.size() + 1);
  std::vector<std::size_t> last(b.size() + 1);
  std::vector<std::size_t> row(b.size() + 1);
  for (std::size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::swap(before_last, last);
    std::swap(last, row);
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t replaced = last[j - 1] + (a[i - 1] == b[j - 1] ? 0 : 1);
      row[j] = std::min({last[j] + 1, row[j - 1] + 1, replaced});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1]) {
        row[j] = std::min(row[j], before_last[j - 2] + 1);
      }
    }
  }
  return row[b.size()];
}

}  // namespace

std::string nearest_name(std::string_view written, const std::vector<std::string>& names) {
  if (written.size() > kLongest) return "";
  std::size_t fewest = std::max<std::size_t>(1, written.size() / 3) + 1;
  std::string nearest;
  for (const std::string& name : names) {
    if (name.size() > kLongest) continue;
    const std::size_t changes = distance(written, name);
    if (changes < fewest) {
      fewest = changes;
      nearest = name;
    }
  }
  return nearest;
}

std::string did_you_mean(std::string_view written, const std::vector<std::string>& names) {
  const std::string near = nearest_name(written, names);
  return near.empty() ? "" : text("; did you mean ", near, "?");
}

}  // namespace tessera
