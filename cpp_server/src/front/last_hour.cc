#include "front/last_hour.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

#include "common/text.h"

namespace tessera {
namespace {

constexpr double kHeight = 40;

std::string figure(double value) {
  char buffer[64];
  std::snprintf(buffer, sizeof(buffer), "%.2f", value);
  return buffer;
}

double largest(const std::deque<LastHour::Point>& points, double LastHour::Point::*field) {
  double most = 0;
  for (const LastHour::Point& point : points) {
    if (!std::isnan(point.*field)) most = std::max(most, point.*field);
  }
  return most;
}

// A line through what there is; nothing is drawn where nothing happened.
std::string line(const std::deque<LastHour::Point>& points, double LastHour::Point::*field,
                 double most, const char* name) {
  std::string path;
  bool drawing = false;
  for (std::size_t i = 0; i < points.size(); ++i) {
    const double value = points[i].*field;
    if (!std::isnan(value)) {
      const std::size_t x = LastHour::kPoints - points.size() + i;
      path += text(drawing ? 'L' : 'M', x, ' ',
                   figure(kHeight - (most > 0 ? kHeight * value / most : 0)));
      if (!drawing) path += "h1";  // one point alone is seen, too
    }
    drawing = !std::isnan(value);
  }
  return text("<path class=\"", name, "\" d=\"", path, "\"/>");
}

std::string plot(const std::string& lines) {
  return text("<svg class=\"plot\" viewBox=\"0 0 ", LastHour::kPoints, " ", kHeight,
              "\" preserveAspectRatio=\"none\">", lines, "</svg>");
}

}  // namespace

void LastHour::add(const Point& point) {
  points_.push_back(point);
  if (points_.size() > kPoints) points_.pop_front();
}

std::string LastHour::plots() const {
  const double latency = largest(points_, &Point::p99_ms);
  const double failures = largest(points_, &Point::failures_per_second);
  return text("<div>",
              plot(line(points_, &Point::p99_ms, latency, "p99") +
                   line(points_, &Point::p50_ms, latency, "p50")),
              plot(line(points_, &Point::failures_per_second, failures, "errors")),
              "</div>\n<div>p99 and p50, up to ", figure(latency), " ms; not answered, up to ",
              figure(failures), "/s</div>\n");
}

}  // namespace tessera
