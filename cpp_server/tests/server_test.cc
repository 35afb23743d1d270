// Flags, metrics, the HTTP port's answers, admission, log lines.
#include <gtest/gtest.h>
#include <malloc.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cmath>
#include <csignal>
#include <filesystem>
#include <string>
#include <thread>
#include <variant>
#include <vector>

#include "common/enums.h"
#include "common/text.h"
#include "fake_repository.h"
#include "front/admission.h"
#include "front/http_front.h"
#include "metrics/histogram.h"
#include "metrics/metrics_page.h"
#include "observe/call_observer.h"
#include "server/config.h"
#include "server/heap_trimmer.h"
#include "server/log.h"
#include "server/signals.h"
#include "support.h"

namespace tessera {
namespace {

enum class Colour { kRed, kGreen, kBlue };
static_assert(enum_size<Colour::kBlue>() == 3);
static_assert(is_enumerator<Colour::kGreen>());
static_assert(!is_enumerator<static_cast<Colour>(3)>());

std::string usage_error(const std::vector<std::string>& arguments) {
  try {
    parse_flags(arguments);
  } catch (const UsageError& error) {
    return error.what();
  }
  return "";
}

TEST(Flags, SetWhatTheySay) {
  const ServerConfig config = parse_flags({"--model",
                                           "a.pt",
                                           "--model=b=dir/b=1.pt",
                                           "--port",
                                           "0",
                                           "--http-port=9",
                                           "--workers",
                                           "3",
                                           "--max-delay-us",
                                           "250",
                                           "--drain-limit-s",
                                           "2.5",
                                           "--log-format",
                                           "text",
                                           "--log-level=debug",
                                           "--skip-golden",
                                           "--ops-dir",
                                           "x",
                                           "--max-queue-requests",
                                           "5"});
  ASSERT_EQ(config.models.size(), 2u);
  EXPECT_EQ(config.models[0].path, "a.pt");
  EXPECT_EQ(config.models[0].name, "");
  EXPECT_EQ(config.models[1].name, "b");
  EXPECT_EQ(config.models[1].path, "dir/b=1.pt");
  EXPECT_EQ(config.port, 0);
  EXPECT_EQ(config.http_port, 9);
  EXPECT_EQ(config.workers, 3);
  EXPECT_EQ(config.batch_limits.max_delay, std::chrono::microseconds(250));
  EXPECT_EQ(config.drain_limit_s, 2.5);
  EXPECT_FALSE(config.log_json);
  EXPECT_EQ(config.log_level, LogLevel::kDebug);
  EXPECT_FALSE(config.verify_golden);
  EXPECT_EQ(config.queue_limits.max_requests, 5);
}

TEST(Flags, ANameOfAModelHoldsNoSlash) {
  const ServerConfig config =
      parse_flags({"--model", "models/date=2026-11-22/model.pt", "--model", "./date=1.pt",
                   "--model", "n=models/date=1.pt", "--model", "date=1.pt"});
  const auto& models = config.models;
  ASSERT_EQ(models.size(), 4u);
  EXPECT_EQ(models[0].path, "models/date=2026-11-22/model.pt");
  EXPECT_EQ(models[0].name, "");
  EXPECT_EQ(models[1].path, "./date=1.pt");
  EXPECT_EQ(models[1].name, "");
  EXPECT_EQ(models[2].path, "models/date=1.pt");
  EXPECT_EQ(models[2].name, "n");
  EXPECT_EQ(models[3].path, "1.pt");
  EXPECT_EQ(models[3].name, "date");
}

TEST(Signals, ARepeatWithinASecondIsTheSameSignal) {
  using std::chrono::milliseconds;
  const TimePoint begin{};
  SignalReader signals;
  EXPECT_EQ(signals.read(SIGHUP, begin), SignalMeaning::kReload);
  EXPECT_EQ(signals.read(SIGTERM, begin), SignalMeaning::kDrain);
  EXPECT_EQ(signals.read(SIGTERM, begin), SignalMeaning::kRepeat);
  EXPECT_EQ(signals.read(SIGINT, begin + milliseconds(999)), SignalMeaning::kRepeat);
  EXPECT_EQ(signals.read(SIGHUP, begin + milliseconds(1'000)), SignalMeaning::kReload);
  EXPECT_EQ(signals.read(SIGTERM, begin + milliseconds(1'000)), SignalMeaning::kEnd);
}

TEST(Signals, ComeToTheWaitingThreadAsDoWakes) {
  sigset_t before;
  pthread_sigmask(SIG_SETMASK, nullptr, &before);
  block_signals();
  {
    SignalWaiter waiter;
    const auto send = [](int number) { ::pthread_kill(::pthread_self(), number); };
    send(SIGHUP);
    EXPECT_EQ(waiter.wait(kNever), SIGHUP);
    send(SIGTERM);
    send(SIGTERM);  // one that is pending already is the same
    EXPECT_EQ(waiter.wait(kNever), SIGTERM);
    EXPECT_EQ(waiter.wait(TimePoint{}), std::nullopt);
    std::jthread other([&] { waiter.wake(); });
    EXPECT_EQ(waiter.wait(kNever), std::nullopt);
    send(SIGINT);
    EXPECT_EQ(waiter.wait(kNever), SIGINT);
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

TEST(Flags, RefuseWithTheRemedy) {
  EXPECT_EQ(usage_error({}),
            "--model is missing; give at least one MODEL.pt, or --model-repository DIR");
  const std::string folder = std::filesystem::temp_directory_path().string();
  EXPECT_EQ(usage_error({"--model-repository", "/nowhere/at/all"}),
            "--model-repository is '/nowhere/at/all'; give a folder that can be read (No such file "
            "or directory)");
  EXPECT_EQ(usage_error({"--model-repository", "/", "--model-repository", "/"}),
            "--model-repository is '/'; give each folder once");
  EXPECT_EQ(usage_error({"--model-repository", folder, "--model-control", "always"}),
            "--model-control is 'always'; give none, poll or explicit");
  EXPECT_EQ(usage_error({"--model", "a", "--model-control", "poll"}),
            "--model-control is poll; there is nothing to control; add --model-repository DIR");
  EXPECT_EQ(usage_error({"--model-repository", folder, "--poll-s", "nan"}),
            "--poll-s is nan; give seconds above 0 and up to 86400");
  EXPECT_EQ(usage_error({"--model-repository", folder, "--max-model-bytes", "-1"}),
            "--max-model-bytes is -1; give a whole number of at least 0");
  EXPECT_EQ(usage_error({"--model", "=x"}), "--model is '=x'; give MODEL.pt or NAME=MODEL.pt");
  EXPECT_EQ(usage_error({"--model", "a", "--port", "70000"}),
            "--port is 70000; give a number of at most 65535");
  EXPECT_EQ(usage_error({"--model", "a", "--port", "1x"}), "--port is '1x'; give a whole number");
  EXPECT_EQ(usage_error({"--model", "a", "--workers", "0"}),
            "--workers is 0; give a whole number of at least 1");
  EXPECT_EQ(usage_error({"--model", "a", "--port", "5", "--http-port", "5"}),
            "--http-port is 5; the gRPC port is the same: choose another");
  EXPECT_EQ(usage_error({"--model", "a", "--max-queue-samples", "5"}),
            "--max-queue-samples is 5; a request of --max-request-samples 16384 could never wait "
            "in it: raise the one or lower the other");
  EXPECT_EQ(
      usage_error({"--model", "a", "--max-inflight-bytes", "5000000"}),
      "--max-inflight-bytes is 5000000; a message of --max-message-bytes 67108864 could never "
      "come in: raise the one or lower the other");
  EXPECT_EQ(usage_error({"--model", "a", "--drain-limit-s", "nan"}).substr(0, 22),
            "--drain-limit-s is nan");
  EXPECT_EQ(usage_error({"--model", "a", "--frobnicate"}),
            "unrecognized argument '--frobnicate'; see --help");
  EXPECT_EQ(usage_error({"--model", "a.pt", "--prot", "1"}),
            "unrecognized argument '--prot'; did you mean --port?");
  EXPECT_EQ(usage_error({"--modle=a.pt"}),
            "unrecognized argument '--modle=a.pt'; did you mean --model?");
  EXPECT_EQ(usage_error({"--model"}), "--model needs a value");
  EXPECT_EQ(usage_error({"--skip-golden=yes"}), "--skip-golden takes no value");
}

TEST(Flags, RepositoriesStandBesideModels) {
  const std::string folder = std::filesystem::temp_directory_path().string();
  const ServerConfig config =
      parse_flags({"--model-repository", folder, "--model-repository", "/", "--model-control",
                   "explicit", "--poll-s", "0.5", "--max-model-bytes", "10000000000"});
  EXPECT_EQ(config.repositories, (std::vector<std::string>{folder, "/"}));
  EXPECT_EQ(config.control, ModelControl::kExplicit);
  EXPECT_EQ(config.poll_s, 0.5);
  EXPECT_EQ(config.max_model_bytes, 10'000'000'000);
  EXPECT_TRUE(config.models.empty());
}

TEST(Flags, LogsOfCommitsAreThoseOfRepositories) {
  const std::string folder = std::filesystem::temp_directory_path().string();
  const ServerConfig config = parse_flags({"--model-repository", folder, "--follow",
                                           "--follow-poll-ms", "50", "--rollback-bytes", "0"});
  EXPECT_TRUE(config.follow);
  EXPECT_EQ(config.follow_poll_ms, 50);
  EXPECT_EQ(config.rollback_bytes, 0);
  EXPECT_FALSE(parse_flags({"--model-repository", folder}).follow);
  EXPECT_EQ(usage_error({"--model", "a.pt", "--follow"}),
            "--follow needs versions with logs of commits; add --model-repository DIR");
}

TEST(Workers, AreHalfOfTheCpusAndSpareOnTheOthers) {
  const auto plan = [](int workers, bool on_cpu, int cpus) {
    ServerConfig config;
    config.workers = workers;
    const WorkerPlan found = plan_workers(config, on_cpu, cpus);
    return std::pair(found.ordinary, found.spare);
  };
  EXPECT_EQ(plan(0, true, 1), std::pair(1, 0));
  EXPECT_EQ(plan(0, true, 2), std::pair(1, 1));
  EXPECT_EQ(plan(0, true, 7), std::pair(3, 4));
  EXPECT_EQ(plan(0, false, 8), std::pair(2, 0));
  // What was asked for is what there is.
  EXPECT_EQ(plan(3, true, 2), std::pair(3, 0));
  EXPECT_EQ(plan(3, false, 8), std::pair(3, 0));
}

#ifndef TESSERA_SANITIZED  // sanitizers have an allocator of their own
// Page faults of a thread that takes some blocks, writes to each page and frees them, again and
// again, as a pass over long bags does.
std::int64_t faults_of_passes() {
  static constexpr int kPasses = 50;
  static constexpr int kBlocks = 8;
  static constexpr std::size_t kBlockBytes = 120'000;
  std::int64_t faults = 0;
  std::jthread([&] {
    const auto pass = [] {
      // Side by side, with nothing between them that stays.
      const std::vector<std::vector<char>> blocks(kBlocks, std::vector<char>(kBlockBytes, 'x'));
    };
    const auto so_far = [] {
      rusage used{};
      ::getrusage(RUSAGE_THREAD, &used);
      return used.ru_minflt;
    };
    pass();
    const auto before = so_far();
    for (int i = 0; i < kPasses; ++i) pass();
    faults = so_far() - before;
  }).join();
  return faults;
}

TEST(HeapTrimTest, KeepsWhatAPassHasFreed) {
  // glibc's thresholds at the start, which earlier tests may have raised.
  constexpr int kAtTheStart = 128 * 1024;
  ::mallopt(M_MMAP_THRESHOLD, kAtTheStart);
  ::mallopt(M_TRIM_THRESHOLD, kAtTheStart);
  EXPECT_GT(faults_of_passes(), 50 * 100);
  keep_freed_memory();
  EXPECT_LT(faults_of_passes(), 50);
}
#endif

TEST(HeapTrimTest, TrimsOnceAfterABurst) {
  constexpr std::int64_t kMegabyte = 1024 * 1024;
  struct Look {
    std::int64_t free_megabytes;
    bool trims;
  };
  // Waves that come back do not count, what stays does, and what was given back counts as unused.
  const Look looks[] = {{40, false}, {4, false},  {19, false}, {19, false}, {19, false},
                        {60, false}, {60, false}, {5, false},  {60, false}, {60, false},
                        {58, true},  {60, false}, {60, false}, {60, false}, {30, false},
                        {60, false}, {60, false}, {60, true}};
  HeapTrim trim;
  int at = 0;
  for (const Look& look : looks) {
    EXPECT_EQ(trim.worth(look.free_megabytes * kMegabyte), look.trims) << "look " << at;
    ++at;
  }
}

TEST(Flags, HelpNeedsNothingElse) {
  EXPECT_TRUE(parse_flags({"--help"}).help);
  EXPECT_NE(usage().find("--max-batch-samples N"), std::string::npos);
}

TEST(HistogramTest, CountsUpToTheBoundInclusive) {
  Histogram histogram(kRequestBuckets);  // 1, 2, 4, ...
  for (const double value : {0.5, 1.0, 1.5, 2.0, 3.0, 1e9}) histogram.observe(value);
  const auto counts = histogram.counts();
  EXPECT_EQ(counts[0], 2u);
  EXPECT_EQ(counts[1], 2u);
  EXPECT_EQ(counts[2], 1u);
  EXPECT_EQ(counts.back(), 1u);
  EXPECT_DOUBLE_EQ(histogram.sum(), 1e9 + 8);
}

TEST(HistogramTest, LosesNothingBetweenThreads) {
  Histogram histogram(kLatencyBuckets);
  {
    std::vector<std::jthread> threads;
    for (int i = 0; i < 4; ++i) {
      threads.emplace_back([&] {
        for (int k = 0; k < 10'000; ++k) histogram.observe(0.25);
      });
    }
  }
  EXPECT_DOUBLE_EQ(histogram.sum(), 10'000);
}

TEST(HistogramTest, EstimatesQuantiles) {
  const std::vector<double> bounds = {1, 2, 4};
  EXPECT_TRUE(std::isnan(quantile(bounds, std::vector<std::uint64_t>{0, 0, 0, 0}, 0.5)));
  EXPECT_DOUBLE_EQ(quantile(bounds, std::vector<std::uint64_t>{2, 2, 0, 0}, 0.5), 1.0);
  EXPECT_DOUBLE_EQ(quantile(bounds, std::vector<std::uint64_t>{0, 0, 4, 0}, 0.5), 3.0);
  EXPECT_DOUBLE_EQ(quantile(bounds, std::vector<std::uint64_t>{0, 0, 0, 9}, 0.5), 4.0);
}

TEST(MetricsTest, PageHasEveryFamily) {
  ModelList models;
  ModelMetrics& model = *models.add("ranker", "3");
  ModelMetrics unresolved("", "");
  model.count_request(Code::kOk, std::chrono::microseconds(2'500));
  unresolved.count_request(Code::kNotFound, std::chrono::microseconds(100));
  const Log log(LogLevel::kError, true, -1);
  const http2::Counters connections;
  const SecurityMetrics security;
  const test::FakeRepository repository;
  ShadowList shadows;
  shadows.of("ranker", "4", "5")->difference.observe(0.25);
  shadows.of("ranker", "4", "5")->count(ShadowResult::kDropped);
  shadows.of("ranker", "4", "6")->count(ShadowResult::kDropped);  // of a version that has gone
  const CallObserver observer({}, "9.9", log);
  const std::string page =
      MetricsPage(models, unresolved, log, connections, security, "9.9", observer)
          .render(&repository, shadows);
  for (const char* line : {
           "tessera_requests_total{model=\"ranker\",version=\"3\",code=\"OK\"} 1\n",
           "tessera_requests_total{model=\"\",version=\"\",code=\"NOT_FOUND\"} 1\n",
           "tessera_rejected_total{model=\"ranker\",version=\"3\",reason=\"queue_full\"} 0\n",
           "tessera_batches_total{model=\"ranker\",version=\"3\",reason=\"drain\"} 0\n",
           "tessera_request_duration_seconds_count{model=\"ranker\",version=\"3\"} 1\n",
           "tessera_model_ready{model=\"ranker\",version=\"3\"} 0\n",
           "tessera_model_state{model=\"ranker\",version=\"4\",state=\"LOADING\"} 1\n",
           "tessera_model_state{model=\"ranker\",version=\"4\",state=\"READY\"} 0\n",
           "tessera_model_load_progress{model=\"ranker\",version=\"4\"} 0.5\n",
           "tessera_model_loads_total{model=\"ranker\",result=\"ok\"} 3\n",
           "tessera_model_loads_total{model=\"ranker\",result=\"failed\"} 2\n",
           "tessera_shadow_score_difference_sum{model=\"ranker\",version=\"4\","
           "shadow_version=\"5\"} 0.25\n",
           "tessera_shadow_calls_total{model=\"ranker\",version=\"5\",result=\"dropped\"} 1\n",
           "tessera_log_lines_dropped_total{log=\"server\"} 0\n",
           "tessera_log_lines_dropped_total{log=\"access\"} 0\n",
           "tessera_spans_total{result=\"sent\"} 0\n",
           "tessera_spans_total{result=\"dropped\"} 0\n",
           "tessera_build_info{server=\"cpp\",version=\"9.9\"} 1\n",
           "# TYPE process_resident_memory_bytes gauge\n",
           "# TYPE process_cpu_seconds_total counter\n",
       }) {
    EXPECT_NE(page.find(line), std::string::npos) << line;
  }
  EXPECT_EQ(page.find("version=\"6\""), std::string::npos);
  // Progress is of what loads; a model without versions has no state.
  EXPECT_EQ(page.find("tessera_model_load_progress{model=\"ranker\",version=\"5\"}"),
            std::string::npos);
  EXPECT_EQ(page.find("tessera_model_state{model=\"empty\""), std::string::npos);
  // A model without requests of no known model shows no rows for them.
  EXPECT_EQ(page.find("model=\"\",version=\"\",code=\"OK\""), std::string::npos);
}

TEST(MetricsTest, PageShowsTheLogsThatAreFollowed) {
  ModelList models;
  ModelMetrics& model = *models.add("ranker", "3");
  const ModelMetrics unresolved("", "");
  const Log log(LogLevel::kError, true, -1);
  const http2::Counters connections;
  const SecurityMetrics security;
  ShadowList shadows;
  const CallObserver observer({}, "9.9", log);
  const MetricsPage metrics(models, unresolved, log, connections, security, "9.9", observer);
  EXPECT_EQ(metrics.render(nullptr, shadows).find("tessera_model_commit{"), std::string::npos);
  model.follow.followed = true;
  model.follow.commit = 42;
  model.follow.rows = 7;
  model.follow.count_refused("golden");
  model.follow.apply.observe(0.002);
  std::string page = metrics.render(nullptr, shadows);
  for (const char* line : {
           "tessera_model_commit{model=\"ranker\",version=\"3\"} 42\n",
           "tessera_commit_rows_total{model=\"ranker\",version=\"3\"} 7\n",
           "tessera_commit_apply_seconds_bucket{model=\"ranker\",version=\"3\",le=\"0.001\"} 0\n",
           "tessera_commit_apply_seconds_bucket{model=\"ranker\",version=\"3\",le=\"0.003\"} 1\n",
           "tessera_commits_refused_total{model=\"ranker\",version=\"3\",reason=\"golden\"} 1\n",
           "tessera_commits_refused_total{model=\"ranker\",version=\"3\",reason=\"gap\"} 0\n",
       }) {
    EXPECT_NE(page.find(line), std::string::npos) << line;
  }
  EXPECT_EQ(page.find("tessera_freshness_seconds{"), std::string::npos);  // not known
  model.follow.set_newest_example(1.0);
  page = metrics.render(nullptr, shadows);
  EXPECT_NE(page.find("tessera_freshness_seconds{model=\"ranker\",version=\"3\"} "),
            std::string::npos);
}

TEST(Http, ReadsHeadsAndWritesAnswers) {
  const auto parsed = [](const std::string& head) {
    const auto read = parse_head(head);
    if (const auto* refusal = std::get_if<HttpAnswer>(&read)) return text(refusal->status);
    const auto& of_request = std::get<HttpHead>(read);
    const char* const methods[] = {"GET", "HEAD", "POST"};
    return text(methods[static_cast<int>(of_request.method)], " ", of_request.path, " ",
                of_request.body_bytes);
  };
  EXPECT_EQ(parsed("GET /a?x=1 HTTP/1.1\r\nHost: h\r\nContent-Length: 7"), "GET /a 0");
  EXPECT_EQ(parsed("HEAD /a HTTP/1.0"), "HEAD /a 0");
  EXPECT_EQ(parsed("POST /a HTTP/1.1\r\nContent-Length: 65536"), "POST /a 65536");
  EXPECT_EQ(parsed("PUT /a HTTP/1.1"), "405");
  for (const char* bad : {"", "GET", "GET a HTTP/1.1", "GET /a", "GET /a SMTP"}) {
    EXPECT_EQ(parsed(bad), "400") << bad;
  }
  const HttpAnswer answer{.body = "body of /a"};
  EXPECT_EQ(http_response(answer),
            "HTTP/1.1 200 OK\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: "
            "10\r\nConnection: close\r\n\r\nbody of /a");
  EXPECT_TRUE(http_response(answer, /*with_body=*/false).ends_with("\r\n\r\n"));
  EXPECT_TRUE(http_response({.status = 404}).starts_with("HTTP/1.1 404 Not Found"));
}

TEST(GateTest, TellsWhenTheLastCallHasLeft) {
  int empty = 0;
  Admission admission([&] { ++empty; });
  EXPECT_TRUE(admission.enter());
  EXPECT_TRUE(admission.enter());
  admission.leave();
  admission.shut();
  EXPECT_EQ(empty, 0);
  EXPECT_FALSE(admission.enter());
  EXPECT_EQ(admission.active(), 1);
  admission.leave();
  EXPECT_GE(empty, 1);
  EXPECT_EQ(admission.active(), 0);
}

}  // namespace
}  // namespace tessera
