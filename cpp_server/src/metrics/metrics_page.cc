#include "metrics/metrics_page.h"

#include <prometheus/metric_family.h>
#include <prometheus/text_serializer.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <functional>
#include <limits>
#include <map>
#include <string>
#include <utility>

#include "metrics/process_metrics.h"

namespace tessera {
namespace {

using prometheus::ClientMetric;
using prometheus::MetricFamily;
using prometheus::MetricType;
using Labels = std::vector<ClientMetric::Label>;

Labels labels_of(const ModelMetrics& model) {
  return {{"model", model.model}, {"version", model.version}};
}

MetricFamily family(std::string name, std::string help, MetricType type) {
  MetricFamily made;
  made.name = std::move(name);
  made.help = std::move(help);
  made.type = type;
  return made;
}

void add(MetricFamily& target, Labels labels, double value) {
  ClientMetric metric;
  metric.label = std::move(labels);
  if (target.type == MetricType::Counter) {
    metric.counter.value = value;
  } else {
    metric.gauge.value = value;
  }
  target.metric.push_back(std::move(metric));
}

Labels with(Labels labels, std::string name, std::string_view value) {
  labels.push_back({std::move(name), std::string(value)});
  return labels;
}

void add(MetricFamily& target, Labels labels, const Histogram& histogram) {
  ClientMetric metric;
  metric.label = std::move(labels);
  const std::vector<std::uint64_t> counts = histogram.counts();
  std::uint64_t total = 0;
  for (std::size_t i = 0; i < counts.size(); ++i) {
    total += counts[i];
    const bool last = i == histogram.bounds().size();
    metric.histogram.bucket.push_back(
        {total, last ? std::numeric_limits<double>::infinity() : histogram.bounds()[i]});
  }
  metric.histogram.sample_count = total;
  metric.histogram.sample_sum = histogram.sum();
  target.metric.push_back(std::move(metric));
}

double value(const std::atomic<std::uint64_t>& counter) {
  return static_cast<double>(counter.load(std::memory_order_relaxed));
}

using Models = ModelList::All;

// Counters by code and reason; `shown` says whether zeros are shown for a model.
void add_requests(std::vector<MetricFamily>& page, const Models& models,
                  const ModelMetrics& unresolved) {
  MetricFamily requests =
      family("tessera_requests_total", "Requests by how they ended", MetricType::Counter);
  MetricFamily rejected = family("tessera_rejected_total", "Requests refused or dropped, by reason",
                                 MetricType::Counter);
  const auto show = [&](const ModelMetrics& model, bool zeros) {
    for (std::size_t i = 0; i < kCountedCodes.size(); ++i) {
      const double count = static_cast<double>(model.requests(i));
      if (zeros || count > 0) {
        add(requests, with(labels_of(model), "code", code_name(kCountedCodes[i])), count);
      }
    }
    for (std::size_t i = 0; i < model.rejected.size(); ++i) {
      const double count = value(model.rejected[i]);
      if (zeros || count > 0) {
        add(rejected, with(labels_of(model), "reason", reason_name(static_cast<RejectReason>(i))),
            count);
      }
    }
  };
  for (const auto& model : models) show(*model, /*zeros=*/true);
  show(unresolved, /*zeros=*/false);
  page.push_back(std::move(requests));
  page.push_back(std::move(rejected));
}

void add_counters(std::vector<MetricFamily>& page, const Models& models) {
  MetricFamily batches =
      family("tessera_batches_total", "Batches by why they were cut", MetricType::Counter);
  MetricFamily ids = family("tessera_ids_total", "Ids that were looked up", MetricType::Counter);
  MetricFamily outside =
      family("tessera_out_of_range_ids_total",
             "Ids outside their table that were clamped or hashed", MetricType::Counter);
  MetricFamily values =
      family("tessera_feature_outside_range_total",
             "Values outside of what the training rows held, by feature", MetricType::Counter);
  MetricFamily missing = family("tessera_feature_missing_total",
                                "Dense values that were missing, by feature", MetricType::Counter);
  for (const auto& model : models) {
    for (std::size_t i = 0; i < kCutReasons; ++i) {
      const auto reason = static_cast<CutReason>(i);
      add(batches, with(labels_of(*model), "reason", reason_name(reason)),
          static_cast<double>(model->batches(reason)));
    }
    add(ids, labels_of(*model), static_cast<double>(model->ids()));
    add(outside, labels_of(*model), value(model->out_of_range_ids));
    model->while_loaded([&](const ModelMetrics::Loaded& loaded) {
      for (const auto& [feature, count] : loaded.features->outside()) {
        add(values, with(labels_of(*model), "feature", feature), static_cast<double>(count));
      }
      for (const auto& [feature, count] : loaded.features->missing()) {
        add(missing, with(labels_of(*model), "feature", feature), static_cast<double>(count));
      }
    });
  }
  for (MetricFamily* made : {&batches, &ids, &outside, &values, &missing}) {
    page.push_back(std::move(*made));
  }
}

void add_histograms(std::vector<MetricFamily>& page, const Models& models) {
  MetricFamily stages = family("tessera_stage_duration_seconds",
                               "Where a request's time goes, by stage", MetricType::Histogram);
  MetricFamily duration = family("tessera_request_duration_seconds",
                                 "From the first byte to the answer", MetricType::Histogram);
  MetricFamily requests = family("tessera_batch_requests", "Requests that shared a forward pass",
                                 MetricType::Histogram);
  MetricFamily samples =
      family("tessera_batch_samples", "Samples of a forward pass", MetricType::Histogram);
  MetricFamily ids = family("tessera_batch_ids", "Ids of a forward pass", MetricType::Histogram);
  for (const auto& model : models) {
    for (std::size_t i = 0; i < kStageNames.size(); ++i) {
      add(stages, with(labels_of(*model), "stage", kStageNames[i]), model->stages[i]);
    }
    add(duration, labels_of(*model), model->duration);
    add(requests, labels_of(*model), model->batch_requests);
    add(samples, labels_of(*model), model->batch_samples);
    add(ids, labels_of(*model), model->batch_ids);
  }
  for (MetricFamily* made : {&stages, &duration, &requests, &samples, &ids}) {
    page.push_back(std::move(*made));
  }
}

// Where dense values lie in their features' ranges.
void add_ranges(std::vector<MetricFamily>& page, const Models& models) {
  MetricFamily positions =
      family("tessera_feature_range_position",
             "Where dense values lie in the range of the training rows, 0 to 1, by feature",
             MetricType::Histogram);
  for (const auto& model : models) {
    model->while_loaded([&](const ModelMetrics::Loaded& loaded) {
      for (const RangeHistograms::Feature& feature : loaded.ranges->features()) {
        add(positions, with(labels_of(*model), "feature", feature.name), feature.positions);
      }
    });
  }
  page.push_back(std::move(positions));
}

// How the scores of each output are spread.
void add_scores(std::vector<MetricFamily>& page, const Models& models) {
  MetricFamily scores =
      family("tessera_score", "Scores that passes have computed, by output", MetricType::Histogram);
  MetricFamily not_finite =
      family("tessera_score_not_finite_total",
             "Scores that are NaN or infinite and therefore not in tessera_score, by output",
             MetricType::Counter);
  for (const auto& model : models) {
    model->while_loaded([&](const ModelMetrics::Loaded& loaded) {
      for (const ScoreCounter::Output& output : loaded.scores->outputs()) {
        add(scores, with(labels_of(*model), "output", output.name), output.scores);
        add(not_finite, with(labels_of(*model), "output", output.name), value(output.not_finite));
      }
    });
  }
  for (MetricFamily* made : {&scores, &not_finite}) page.push_back(std::move(*made));
}

void add_gauges(std::vector<MetricFamily>& page, const Models& models,
                const std::string& server_version) {
  const auto gauge = [](const char* name, const char* help) {
    return family(name, help, MetricType::Gauge);
  };
  MetricFamily requests = gauge("tessera_queue_requests", "Requests that wait");
  MetricFamily samples = gauge("tessera_queue_samples", "Samples that wait");
  MetricFamily inflight = gauge("tessera_inflight_batches", "Batches that workers hold");
  MetricFamily load = gauge("tessera_model_load_duration_seconds", "How long loading took");
  MetricFamily ready = gauge("tessera_model_ready", "1 when the model answers");
  MetricFamily info = gauge("tessera_model_info", "Always 1");
  MetricFamily memory = gauge("tessera_device_memory_bytes", "Bytes held");
  for (const auto& model : models) {
    const Labels labels = labels_of(*model);
    add(ready, labels, model->ready.load(std::memory_order_relaxed) ? 1.0 : 0.0);
    double waiting_requests = 0;
    double waiting_samples = 0;
    model->while_loaded([&](const ModelMetrics::Loaded& loaded) {
      waiting_requests = static_cast<double>(loaded.gauges.queue_requests());
      waiting_samples = static_cast<double>(loaded.gauges.queue_samples());
      for (const ModelMetrics::DeviceCounters& device : loaded.devices) {
        add(inflight, with(labels, "device", device.name),
            static_cast<double>(device.inflight_batches.load(std::memory_order_relaxed)));
      }
      const ModelMetrics::Facts& facts = loaded.facts;
      add(load, labels, facts.load_seconds);
      add(info,
          with(with(with(with(labels, "sha256", facts.sha256()), "torch", facts.torch), "dtype",
                    facts.dtype),
               "device", facts.device),
          1);
      for (const DeviceMemory& held : loaded.gauges.memory()) {
        add(memory, with(with(labels, "device", held.device), "kind", held.kind),
            static_cast<double>(held.bytes));
      }
      add(memory, with(with(labels, "device", "cpu"), "kind", "buffers"),
          value(loaded.buffer_bytes));
    });
    add(requests, labels, waiting_requests);
    add(samples, labels, waiting_samples);
  }
  MetricFamily build = gauge("tessera_build_info", "Always 1");
  add(build, {{"server", "cpp"}, {"version", server_version}}, 1);
  for (MetricFamily* made :
       {&requests, &samples, &inflight, &load, &ready, &info, &memory, &build}) {
    page.push_back(std::move(*made));
  }
}

// The logs of commits of the versions that follow one.
void add_commits(std::vector<MetricFamily>& page, const Models& models) {
  MetricFamily commit =
      family("tessera_model_commit", "The commit of the state that answers, 0: the package itself",
             MetricType::Gauge);
  MetricFamily freshness =
      family("tessera_freshness_seconds",
             "How long ago the newest training example of the state that answers was made",
             MetricType::Gauge);
  MetricFamily rows = family("tessera_commit_rows_total",
                             "Rows of tables that commits have changed", MetricType::Counter);
  MetricFamily apply =
      family("tessera_commit_apply_seconds",
             "How long batches waited while a commit was written and its golden answers computed",
             MetricType::Histogram);
  MetricFamily refused = family("tessera_commits_refused_total",
                                "Commits that were not taken, by reason", MetricType::Counter);
  const double now =
      std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
  for (const auto& model : models) {
    const FollowMetrics& follow = model->follow;
    if (!follow.followed) continue;
    const Labels labels = labels_of(*model);
    add(commit, labels, static_cast<double>(follow.commit.load()));
    if (const auto newest = follow.newest_example()) add(freshness, labels, now - *newest);
    add(rows, labels, value(follow.rows));
    add(apply, labels, follow.apply);
    for (std::size_t i = 0; i < follow.refused.size(); ++i) {
      add(refused, with(labels, "reason", kCommitRefusals[i]), value(follow.refused[i]));
    }
  }
  for (MetricFamily* made : {&commit, &freshness, &rows, &apply, &refused}) {
    page.push_back(std::move(*made));
  }
}

// What has come of the gRPC port's connections.
void add_connections(std::vector<MetricFamily>& page, const http2::Counters& counters) {
  page.push_back(family("tessera_connections", "Connections of the gRPC port", MetricType::Gauge));
  add(page.back(), {}, static_cast<double>(counters.connections.load(std::memory_order_relaxed)));
  page.push_back(family("tessera_streams", "Calls that are open on them", MetricType::Gauge));
  add(page.back(), {}, static_cast<double>(counters.streams.load(std::memory_order_relaxed)));
  page.push_back(family("tessera_connections_closed_total",
                        "Connections of the gRPC port that were closed, by reason",
                        MetricType::Counter));
  for (std::size_t i = 0; i < counters.closed.size(); ++i) {
    add(page.back(), {{"reason", std::string(http2::kCloseReasonNames[i])}},
        value(counters.closed[i]));
  }
}

// What guards the server has done; without figures where there is none.
void add_security(std::vector<MetricFamily>& page, const SecurityMetrics& security) {
  page.push_back(family("tessera_calls_refused_total",
                        "Calls and requests that were refused for their token, by reason",
                        MetricType::Counter));
  if (security.tokens.watched) {
    for (std::size_t i = 0; i < security.refused.size(); ++i) {
      add(page.back(), with({}, "reason", kTokenRefusalNames[i]), value(security.refused[i]));
    }
  }
  MetricFamily reloads =
      family("tessera_secret_reloads_total",
             "Changed files of tokens or certificates that were read again, by result",
             MetricType::Counter);
  for (const SecretReloads* one : {&security.tokens, &security.certificates}) {
    if (!one->watched) continue;
    const Labels labels = with({}, "files", one->files);
    add(reloads, with(labels, "result", "taken"), value(one->taken));
    add(reloads, with(labels, "result", "refused"), value(one->refused));
  }
  page.push_back(std::move(reloads));
  page.push_back(family("tessera_certificate_end_seconds",
                        "When the server's certificate ends, seconds since 1970",
                        MetricType::Gauge));
  if (security.certificates.watched) add(page.back(), {}, security.certificate_ends);
}

// Where the versions of repositories stand.
void add_versions(std::vector<MetricFamily>& page, const std::vector<IndexEntry>& entries) {
  MetricFamily states =
      family("tessera_model_state", "1 for the state that the version is in", MetricType::Gauge);
  MetricFamily progress = family("tessera_model_load_progress",
                                 "How much of a load has been done, 0 to 1", MetricType::Gauge);
  for (const IndexEntry& entry : entries) {
    if (entry.version.empty()) continue;
    const Labels labels = {{"model", entry.model}, {"version", entry.version}};
    for (std::size_t i = 0; i < kVersionStates; ++i) {
      const auto state = static_cast<VersionState>(i);
      add(states, with(labels, "state", state_name(state)), state == entry.state ? 1 : 0);
    }
    if (entry.state == VersionState::kLoading) add(progress, labels, entry.progress);
  }
  for (MetricFamily* made : {&states, &progress}) page.push_back(std::move(*made));
}

void add_loads(std::vector<MetricFamily>& page, const std::vector<LoadCount>& counts) {
  page.push_back(
      family("tessera_model_loads_total", "Loads of a repository's versions", MetricType::Counter));
  for (const LoadCount& count : counts) {
    const Labels labels = {{"model", count.model}};
    add(page.back(), with(labels, "result", "ok"), static_cast<double>(count.ok));
    add(page.back(), with(labels, "result", "failed"), static_cast<double>(count.failed));
  }
}

// What shadows have computed.
void add_shadows(std::vector<MetricFamily>& page, const ShadowList::All& shadows) {
  MetricFamily difference =
      family("tessera_shadow_score_difference",
             "Absolute differences of a shadow's scores from those that were answered",
             MetricType::Histogram);
  // Summed over the versions that have answered the shadow's calls.
  std::map<std::pair<std::string, std::string>, std::array<double, kShadowResults>> counts;
  for (const auto& shadow : shadows) {
    auto& of_shadow = counts[{shadow->model, shadow->shadow_version}];
    for (std::size_t i = 0; i < kShadowResults; ++i) of_shadow[i] += value(shadow->calls[i]);
    add(difference,
        {{"model", shadow->model},
         {"version", shadow->version},
         {"shadow_version", shadow->shadow_version}},
        shadow->difference);
  }
  MetricFamily calls = family("tessera_shadow_calls_total",
                              "Calls that a shadow was to compute, too, by what became of them",
                              MetricType::Counter);
  for (const auto& [place, of_shadow] : counts) {
    const Labels labels = {{"model", place.first}, {"version", place.second}};
    for (std::size_t i = 0; i < kShadowResults; ++i) {
      add(calls, with(labels, "result", result_name(static_cast<ShadowResult>(i))), of_shadow[i]);
    }
  }
  for (MetricFamily* made : {&difference, &calls}) page.push_back(std::move(*made));
}

}  // namespace

MetricsPage::MetricsPage(const ModelList& models, const ModelMetrics& unresolved, const Log& log,
                         const http2::Counters& connections, const SecurityMetrics& security,
                         std::string server_version, const CallObserver& observer)
    : models_(models),
      unresolved_(unresolved),
      log_(log),
      connections_(connections),
      security_(security),
      server_version_(std::move(server_version)),
      observer_(observer) {}

std::string MetricsPage::render(const RepositoryControl* repository, ShadowList& shadows) const {
  std::vector<MetricFamily> page;
  const Models models = models_.all();
  add_requests(page, models, unresolved_);
  add_counters(page, models);
  add_histograms(page, models);
  add_ranges(page, models);
  add_scores(page, models);
  add_gauges(page, models, server_version_);
  add_commits(page, models);
  add_connections(page, connections_);
  add_security(page, security_);
  const std::vector<IndexEntry> entries =
      repository == nullptr ? std::vector<IndexEntry>{} : repository->index();
  add_versions(page, entries);
  add_loads(page, repository == nullptr ? std::vector<LoadCount>{} : repository->load_counts());
  add_shadows(page, shadows.both_in(entries));
  page.push_back(family("tessera_log_lines_dropped_total",
                        "Log lines that found no room or could not be written",
                        MetricType::Counter));
  add(page.back(), {{"log", "server"}}, static_cast<double>(log_.dropped_lines()));
  add(page.back(), {{"log", "access"}}, static_cast<double>(observer_.dropped_lines()));
  page.push_back(family("tessera_spans_total", "Spans of traced calls, by what became of them",
                        MetricType::Counter));
  add(page.back(), {{"result", "sent"}}, static_cast<double>(observer_.sent_spans()));
  add(page.back(), {{"result", "dropped"}}, static_cast<double>(observer_.dropped_spans()));
  page.push_back(family("tessera_records_total", "Recorded requests, by what became of them",
                        MetricType::Counter));
  add(page.back(), {{"result", "written"}}, static_cast<double>(observer_.written_records()));
  add(page.back(), {{"result", "dropped"}}, static_cast<double>(observer_.dropped_records()));
  page.push_back(
      family("tessera_record_bytes_total", "Bytes of recorded requests", MetricType::Counter));
  add(page.back(), {}, static_cast<double>(observer_.record_bytes()));
  for (const ProcessMetric& metric : process_metrics()) {
    page.push_back(
        family(metric.name, metric.help, metric.counter ? MetricType::Counter : MetricType::Gauge));
    add(page.back(), {}, metric.value);
  }
  return prometheus::TextSerializer().Serialize(page);
}

}  // namespace tessera
