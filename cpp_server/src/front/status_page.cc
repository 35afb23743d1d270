#include "front/status_page.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <functional>
#include <numeric>
#include <optional>
#include <utility>

#include "common/text.h"
#include "front/page_texts.h"

namespace tessera {
namespace {

constexpr Duration kWindow = std::chrono::seconds(60);
constexpr Duration kFreshnessWindow = std::chrono::seconds(600);
// So many features of all models are shown with their counts, those with the most first.
constexpr std::size_t kMostFeatures = 20;

constexpr const char* kHead = R"(<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<noscript><meta http-equiv="refresh" content="2"></noscript>
)";

constexpr const char* kColumns =
    "<tr><th>model</th><th>version</th><th>state</th><th>requests/s</th>"
    "<th>not answered/s</th><th>p50 ms</th><th>p99 ms</th><th>waiting</th>"
    "<th>batches in work</th><th>samples per batch</th></tr>\n";

std::string figure(double value, int digits) {
  if (std::isnan(value)) return "-";
  char buffer[64];
  std::snprintf(buffer, sizeof(buffer), "%.*f", digits, value);
  return buffer;
}

// The beginning of a table that scrolls in a box of its own where the window is narrow; kTableEnd
// ends it.
std::string table(const std::string& name) {
  return text("<div class=\"wide\" tabindex=\"0\" role=\"region\" aria-label=\"", name,
              "\"><table>\n");
}

constexpr const char* kTableEnd = "</table></div>\n";

std::string cell(const std::string& content) { return "<td>" + content + "</td>"; }

// What is said of where a version stands: its progress, or why it does not answer.
std::string detail(const IndexEntry& entry) {
  if (entry.state != VersionState::kLoading) return html_escaped(entry.reason);
  return text("<progress max=\"100\" value=\"", figure(entry.progress * 100, 0), "\"></progress> ",
              figure(entry.progress * 100, 0), "%");
}

// "3", or "3.42" where the version follows its log.
std::string state_of(const IndexEntry& entry) {
  return entry.commit.has_value() ? text(entry.version, ".", *entry.commit) : entry.version;
}

// The versions of repositories: where each stands, and what names it.
std::string versions_table(const std::vector<IndexEntry>& versions) {
  if (versions.empty()) return {};
  std::string html = "<h2>Versions</h2>\n" + table("Versions") +
                     "<tr><th>model</th><th>version</th>"
                     "<th>state</th><th>labels</th><th>share of traffic</th><th></th></tr>\n";
  for (const IndexEntry& entry : versions) {
    std::string labels;
    for (const std::string& label : entry.labels) labels += (labels.empty() ? "" : ", ") + label;
    if (entry.shadow) labels += labels.empty() ? "(shadow)" : " (shadow)";
    html += "<tr>" + cell(html_escaped(entry.model)) + cell(html_escaped(state_of(entry))) +
            cell(html_escaped(std::string(state_name(entry.state)))) + cell(html_escaped(labels)) +
            cell(entry.percent > 0 ? text(entry.percent, "%") : "") + "<td class=\"prose\">" +
            detail(entry) + "</td></tr>\n";
  }
  return html + kTableEnd;
}

// What shadows have computed, and how far their scores were from those that were answered.
std::string shadows_table(const ShadowList::All& shadows) {
  if (shadows.empty()) return {};
  std::string html =
      "<h2>Shadows</h2>\n" + table("Shadows") +
      "<tr><th>model</th><th>answered by</th><th>shadow</th>"
      "<th>compared</th><th>dropped</th><th>failed</th><th>difference of scores: mean</th>"
      "<th>p50</th><th>p99</th></tr>\n";
  for (const auto& shadow : shadows) {
    const std::vector<std::uint64_t> counts = shadow->difference.counts();
    const auto scores =
        static_cast<double>(std::accumulate(counts.begin(), counts.end(), std::uint64_t{0}));
    const auto bounds = shadow->difference.bounds();
    html += "<tr>" + cell(html_escaped(shadow->model)) + cell(html_escaped(shadow->version)) +
            cell(html_escaped(shadow->shadow_version));
    for (const auto& calls : shadow->calls) html += cell(text(calls.load()));
    html += cell(figure(scores > 0 ? shadow->difference.sum() / scores : NAN, 6)) +
            cell(figure(quantile(bounds, counts, 0.5), 6)) +
            cell(figure(quantile(bounds, counts, 0.99), 6)) + "</tr>\n";
  }
  return html + kTableEnd;
}

// A feature that was sent values unlike those of the training rows, since the start.
struct UnlikeValues {
  std::string model;
  std::string version;
  std::string feature;
  std::uint64_t outside = 0;
  std::uint64_t missing = 0;
};

// Finds those of one model, in the order of its features.
std::vector<UnlikeValues> unlike_values(const ModelMetrics& model) {
  std::vector<UnlikeValues> found;
  model.while_loaded([&](const ModelMetrics::Loaded& loaded) {
    if (loaded.features == nullptr) return;
    for (const auto& [feature, count] : loaded.features->outside()) {
      found.push_back(
          {.model = model.model, .version = model.version, .feature = feature, .outside = count});
    }
    // The dense features are the first of those, in the same order.
    std::size_t place = 0;
    for (const auto& [feature, count] : loaded.features->missing()) found[place++].missing = count;
  });
  std::erase_if(found, [](const UnlikeValues& one) { return one.outside + one.missing == 0; });
  return found;
}

// The features of all models with the most such values.
std::string features_table(const ModelList& models) {
  std::vector<UnlikeValues> found;
  for (const auto& model : models.all()) {
    for (UnlikeValues& one : unlike_values(*model)) found.push_back(std::move(one));
  }
  if (found.empty()) return {};
  std::ranges::stable_sort(found, std::greater(),
                           [](const UnlikeValues& one) { return one.outside + one.missing; });
  found.resize(std::min(found.size(), kMostFeatures));
  std::string html = "<h2>Values unlike the training rows</h2>\n" +
                     table("Values unlike the training rows") +
                     "<tr><th>model</th><th>version</th>"
                     "<th>feature</th><th>outside of the range</th><th>missing</th></tr>\n";
  for (const UnlikeValues& one : found) {
    html += "<tr>" + cell(html_escaped(one.model)) + cell(html_escaped(one.version)) +
            cell(html_escaped(one.feature)) + cell(text(one.outside)) + cell(text(one.missing)) +
            "</tr>\n";
  }
  return html + kTableEnd;
}

}  // namespace

std::string html_escaped(const std::string& text) {
  std::string escaped;
  for (const char c : text) {
    switch (c) {
      case '&': escaped += "&amp;"; break;
      case '<': escaped += "&lt;"; break;
      case '>': escaped += "&gt;"; break;
      case '"': escaped += "&quot;"; break;
      default: escaped += c;
    }
  }
  return escaped;
}

StatusPage::StatusPage(const ModelList& models, const Clock& clock)
    : models_(models), clock_(clock), began_(clock.now()) {
  tick();
}

StatusPage::Snapshot StatusPage::snapshot(const ModelMetrics& model, TimePoint now) {
  std::uint64_t failures = 0;
  for (std::size_t i = 0; i < kCountedCodes.size(); ++i) {
    if (kCountedCodes[i] != Code::kOk) failures += model.requests(i);
  }
  return {now, model.duration.counts(), failures};
}

LastHour::Point StatusPage::point_between(std::span<const double> bounds, const Snapshot& first,
                                          const Snapshot& second) {
  std::vector<std::uint64_t> counts;
  for (std::size_t i = 0; i < second.durations.size(); ++i) {
    counts.push_back(second.durations[i] - first.durations[i]);
  }
  const double lasted = std::max(seconds(second.time - first.time), 1e-9);
  return {.p50_ms = quantile(bounds, counts, 0.5) * 1e3,
          .p99_ms = quantile(bounds, counts, 0.99) * 1e3,
          .failures_per_second = static_cast<double>(second.failures - first.failures) / lasted};
}

void StatusPage::tick() {
  const TimePoint now = clock_.now();
  std::map<std::shared_ptr<const ModelMetrics>, Past> kept;
  for (const auto& model : models_.all()) {
    const bool is_new = !past_.contains(model);
    Past& own = kept[model] = std::move(past_[model]);
    own.minute.push_back(snapshot(*model, now));
    if (is_new) own.at_point = own.minute.back();
    while (now - own.minute.front().time > kWindow) own.minute.pop_front();
    if (now - own.at_point.time < LastHour::kStep) continue;
    own.hour.add(point_between(model->duration.bounds(), own.at_point, own.minute.back()));
    own.at_point = own.minute.back();
  }
  past_ = std::move(kept);  // without those that are shown no more
  note_freshness(now);
}

void StatusPage::note_freshness(TimePoint now) {
  const double time_of_day =
      std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
  decltype(freshness_) kept;
  for (const auto& [model, past] : past_) {
    const std::optional<double> newest = model->follow.newest_example();
    if (!model->follow.followed || !newest.has_value()) continue;
    std::deque<Freshness>& own = kept[model] = std::move(freshness_[model]);
    own.push_back({.time = now, .seconds = time_of_day - *newest});
    while (now - own.front().time > kFreshnessWindow) own.pop_front();
  }
  freshness_ = std::move(kept);
}

// A line from left (ten minutes ago) to right (now); its top is the largest.
std::string StatusPage::freshness(const ModelMetrics& model, const std::deque<Freshness>& points,
                                  TimePoint now) {
  constexpr double kHeight = 60;
  double most = 0;
  for (const Freshness& point : points) most = std::max(most, point.seconds);
  std::string line;
  for (const Freshness& point : points) {
    const double x = seconds(kFreshnessWindow - (now - point.time));
    const double y = most > 0 ? kHeight * (1 - std::max(point.seconds, 0.0) / most) : kHeight;
    line += (line.empty() ? "" : " ") + figure(x, 0) + "," + figure(y, 1);
  }
  return text(
      "<figure><svg class=\"freshness\" viewBox=\"0 0 600 60\" preserveAspectRatio=\"none\">",
      "<polyline points=\"", line, "\"/></svg>\n<figcaption>", html_escaped(model.model), " ",
      html_escaped(model.version), ".", model.follow.commit.load(), ": ",
      figure(points.back().seconds, 1), " s (at most ", figure(most, 1),
      " s in 10 minutes)</figcaption></figure>\n");
}

std::string StatusPage::row(const ModelMetrics& model, const Snapshot& past, TimePoint now) const {
  const Snapshot current = snapshot(model, now);
  std::vector<std::uint64_t> window;
  for (std::size_t i = 0; i < current.durations.size(); ++i) {
    window.push_back(current.durations[i] - past.durations[i]);
  }
  const double lasted = std::max(seconds(now - past.time), 1e-9);
  const auto requests =
      static_cast<double>(std::accumulate(window.begin(), window.end(), std::uint64_t{0}));
  const auto failures = static_cast<double>(current.failures - past.failures);
  const std::vector<std::uint64_t> batch_counts = model.batch_samples.counts();
  const auto batches = static_cast<double>(
      std::accumulate(batch_counts.begin(), batch_counts.end(), std::uint64_t{0}));
  const double samples = batches > 0 ? model.batch_samples.sum() / batches : NAN;
  std::int64_t waiting = 0;
  std::int64_t inflight = 0;
  model.while_loaded([&](const ModelMetrics::Loaded& loaded) {
    waiting = loaded.gauges.queue_requests();
    inflight = loaded.inflight_batches();
  });
  const auto bounds = model.duration.bounds();
  const std::string name = html_escaped(model.model);
  const std::string version = html_escaped(model.version);
  const std::string state = model.ready.load() ? "ready" : "loading";
  return text("<tr data-model=\"", name, "\" data-version=\"", version, "\" data-state=\"", state,
              "\">") +
         cell(name) + cell(version) + cell(state) + cell(figure(requests / lasted, 1)) +
         cell(figure(failures / lasted, 1)) + cell(figure(quantile(bounds, window, 0.5) * 1e3, 2)) +
         cell(figure(quantile(bounds, window, 0.99) * 1e3, 2)) + cell(text(waiting)) +
         cell(text(inflight)) + cell(figure(samples, 1)) + "</tr>\n";
}

std::string StatusPage::page(const std::string& state, const std::string& version,
                             const std::vector<IndexEntry>& versions,
                             const ShadowList::All& shadows) const {
  const TimePoint now = clock_.now();
  std::string html = text(kHead, "<title>tessera-server: ", html_escaped(state),
                          "</title>\n<style>", kPageStyle, "</style>\n</head>\n<body>\n");
  html += "<div data-live id=\"live-models\">\n<h1>tessera-server <span class=\"state " +
          html_escaped(state) + "\">" + html_escaped(state) + "</span></h1>\n";
  html += table("models") + kColumns;
  for (const auto& model : models_.all()) {
    const auto known = past_.find(model);
    const bool is_new = known == past_.end();
    html += row(*model, is_new ? snapshot(*model, now) : known->second.minute.front(), now);
  }
  html += text(kTableEnd, "</div>\n<p id=\"stale\" class=\"refused\" role=\"status\"></p>\n",
               kRequestForm, "<div data-live id=\"live-more\">\n", features_table(models_),
               versions_table(versions), shadows_table(shadows), "<h2>Last hour</h2>\n");
  for (const auto& model : models_.all()) {
    const auto known = past_.find(model);
    if (known == past_.end()) continue;
    html += text("<h3>", html_escaped(model->model), " ", html_escaped(model->version), "</h3>\n",
                 known->second.hour.plots());
  }
  if (!freshness_.empty()) html += "<h2>Freshness</h2>\n";
  for (const auto& [model, points] : freshness_) html += freshness(*model, points, now);
  html += text("</div>\n<footer data-live id=\"live-foot\">tessera ", html_escaped(version),
               ", up ", std::chrono::duration_cast<std::chrono::seconds>(now - began_).count(),
               " s. Rates and latencies are of the last minute, samples per batch and values of "
               "features since the start. <a href=\"/metrics\">metrics</a></footer>\n<script>",
               kPageScript, "</script>\n</body>\n</html>\n");
  return html;
}

}  // namespace tessera
