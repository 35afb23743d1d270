// For which numbers of rows a session on a GPU records CUDA graphs.
//
// A batch is padded to the next number. Small ones double: a GPU computes a few rows more in the
// same time. From kGraphRowsStep on each is that much more than the one before, since there every
// row of padding costs its time: of a batch of 2,100 rows that doubling would pad to 4,096, nearly
// half.
//
// Contract: a pure function.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace tessera {

inline constexpr std::int64_t kGraphRowsStep = 512;

// Ascending from 1; the last is the first that is at least `most`.
inline std::vector<std::int64_t> graph_rows(std::int64_t most) {
  std::vector<std::int64_t> rows = {1};
  while (rows.back() < most) {
    rows.push_back(rows.back() + std::min(rows.back(), kGraphRowsStep));
  }
  return rows;
}

}  // namespace tessera
