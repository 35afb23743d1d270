// A model's last hour as two small plots of the status page: latency, and
// requests without scores.
//
// Contract: a plain value; at most an hour's points are kept.
#pragma once

#include <chrono>
#include <cstddef>
#include <deque>
#include <string>

#include "common/clock.h"

namespace tessera {

class LastHour {
 public:
  static constexpr Duration kStep = std::chrono::seconds(20);
  static constexpr std::size_t kPoints = std::chrono::hours(1) / kStep;

  // What happened in one step; NaN where there was nothing.
  struct Point {
    double p50_ms = 0;
    double p99_ms = 0;
    double failures_per_second = 0;
  };

  void add(const Point& point);

  // HTML: two plots with their largest values, now at the right.
  std::string plots() const;

 private:
  std::deque<Point> points_;
};

}  // namespace tessera
