#include "server/server.h"

#include <sched.h>

#include <algorithm>
#include <map>
#include <utility>

#include "common/pace.h"
#include "common/text.h"
#include "common/thread_name.h"
#include "front/page_texts.h"
#include "front/rest_pages.h"
#include "model/loader.h"
#include "model/served_model.h"
#include "package/manifest.h"
#include "package/package_file.h"
#include "package/records.h"
#include "package/table_memory.h"
#include "server/load_options.h"
#include "server/security_flags.h"
#include "server/shared_memory_flags.h"
#include "server/version.h"

namespace tessera {
namespace {

// No call for so long: nobody is left who has not heard that the server is going.
constexpr Duration kQuiet = std::chrono::milliseconds(50);
constexpr int kQuietTries = 20;
// The part of --max-inflight-bytes that bodies over HTTP may take beside it while they come.
constexpr std::int64_t kBodiesShare = 4;
// Copying what torch has opened on the host to a GPU has a part of a load's share, as batches wait
// for pieces that are being copied.
constexpr double kCopyingShare = 1.0 / 3;
// What clients may take to read the last answers and to close their connections.
constexpr Duration kFlush = std::chrono::seconds(1);

}  // namespace

Server::Names Server::read_names(const ServerConfig& config) {
  Names result;
  std::map<std::string, std::string> paths;
  for (const ModelSource& source : config.models) {
    const PackageFile file(source.path);
    const Manifest manifest = read_manifest(Records(file));
    const std::string name = source.name.empty() ? manifest.name : source.name;
    const auto [other, is_new] = paths.emplace(name, source.path);
    if (!is_new) {
      throw UsageError(text("--model: ", other->second, " and ", source.path, " are both named '",
                            name,
                            "'; give one another name with --model "
                            "NAME=",
                            source.path));
    }
    result.names.push_back(name);
    result.versions.push_back(manifest.version);
  }
  return result;
}

Server::Server(const ServerConfig& config, const Log& log)
    : config_(config),
      log_(log),
      trusted_(read_keys(config)),
      names_(read_names(config)),
      admission_([this] { signal_waiter_.wake(); }),
      budget_(config.max_inflight_bytes),
      registry_(names_.names),
      security_(config, security_metrics_, clock_, log),
      observer_(config.observer, kVersion, log),
      metrics_page_(counters_, unresolved_, log, connections_, security_metrics_, kVersion,
                    observer_),
      status_page_(counters_, clock_),
      repository_(make_manager()),
      shared_memory_(make_shared_memory(config)),
      context_{registry_,
               unresolved_,
               admission_,
               budget_,
               clock_,
               log,
               config.repositories.empty() ? nullptr : &shadows_,
               config.repositories.empty() ? nullptr : &recent_,
               observer_.active() ? &observer_ : nullptr,
               shared_memory_.get()},
      grpc_(context_, facts(), connections_) {
  for (std::size_t i = 0; i < names_.names.size(); ++i) {
    counters_.add(names_.names[i], names_.versions[i]);
  }
}

Server::~Server() { close(); }

ServerFacts Server::facts() const {
  const auto draining = [this] { return draining_.load(); };
  return {registry_, clock_, kVersion, draining, repository_.get(), shared_memory_.get()};
}

std::string Server::state() const {
  if (draining_) return "draining";
  return registry_.ready() ? "ready" : "loading";
}

HttpAnswer Server::page(const std::string& path) const {
  if (path == "/metrics") {
    return {.content_type = "text/plain; version=0.0.4; charset=utf-8",
            .body = metrics_page_.render(repository_.get(), shadows_)};
  }
  if (path == "/healthz") return {.body = "ok\n"};
  if (path == "/readyz") {
    const std::string now = state();
    return {.status = now == "ready" ? 200 : 503, .body = now + "\n"};
  }
  if (path == "/") {
    const std::vector<IndexEntry> versions =
        repository_ == nullptr ? std::vector<IndexEntry>{} : repository_->index();
    return {.content_type = "text/html; charset=utf-8",
            .body = status_page_.page(state(), kVersion, versions, shadows_.both_in(versions)),
            .policy = kPagePolicy};
  }
  if (is_rest_path(path)) return rest_page(facts(), path);
  return {.status = 404, .body = "there is /, /metrics, /healthz, /readyz and /v2\n"};
}

std::shared_ptr<HttpCall> Server::post(HttpRequest request, HttpDone done) {
  const std::string& path = request.head.path;
  if (RestService::answers(path)) return rest_->begin(std::move(request), std::move(done));
  answer_rest_post(facts(), request, std::move(done));
  return nullptr;
}

void Server::open() {
  std::vector<std::string> paths;
  for (const ModelSource& source : config_.models) paths.push_back(source.path);
  log_.info("start", {{"tessera", kVersion}, {"models", paths}});
  rest_ =
      std::make_unique<RestService>(context_, static_cast<std::size_t>(config_.max_message_bytes));
  http_ = std::make_unique<HttpFront>(
      HttpOptions{.host = config_.host,
                  .port = config_.http_port,
                  .max_connections = config_.max_http_connections,
                  .max_bodies_bytes = std::max<std::int64_t>(
                      config_.max_inflight_bytes / kBodiesShare, config_.max_message_bytes),
                  .most_body_bytes =
                      [most = static_cast<std::size_t>(config_.max_message_bytes)](
                          const std::string& path) {
                        return RestService::answers(path) ? most : kMaxBodyBytes;
                      },
                  .tls = security_.http_tls(),
                  .hosts = host_rule(config_),
                  .refusal = [this](const HttpHead& head) { return security_.refusal(head); }},
      [this](const std::string& path) { return page(path); },
      [this](HttpRequest request, HttpDone done) {
        return post(std::move(request), std::move(done));
      },
      [this] {
        status_page_.tick();
        security_.look();
        const std::int64_t unused = heap_.tick();
        if (unused > 0) log_.debug("heap_trimmed", {{"unused_bytes", unused}});
      },
      log_);
  port_ = grpc_.start({.host = config_.host,
                       .port = config_.port,
                       .socket_file = config_.grpc_socket,
                       .limits = connection_limits(config_),
                       .gate = security_.gate(),
                       .tls = security_.grpc_tls()},
                      default_workers());
}

void Server::load() {
  try {
    load_all();
    if (repository_ != nullptr) {
      repository_->start();
    } else {
      begin_to_serve();
    }
  } catch (const std::exception&) {
    load_failure_ = std::current_exception();
    loading_ = Loading::kFailed;
    signal_waiter_.wake();
  }
}

void Server::tell_serving(const std::string& model, bool serving) {
  grpc_.set_serving(model, serving && !draining_);
  // Either the drain, which says so first and then tells every model, tells this one later, or it
  // is seen here.
  if (draining_) grpc_.set_serving(model, false);
}

// Every --model answers, and each load of a repository's start has ended.
void Server::begin_to_serve() {
  tell_serving("", true);
  // Said last: whoever reads it may send a signal at once, and gets a drain.
  loading_ = Loading::kDone;
  if (draining_) return;
  const std::int64_t http_port = http_->port();
  if (config_.grpc_socket.empty()) {
    log_.info("ready",
              {{"host", config_.host}, {"port", std::int64_t{port_}}, {"http_port", http_port}});
  } else {
    log_.info("ready", {{"host", config_.host},
                        {"port", std::int64_t{port_}},
                        {"http_port", http_port},
                        {"grpc_socket", config_.grpc_socket}});
  }
  signal_waiter_.wake();
}

std::unique_ptr<RepositoryManager> Server::make_manager() {
  if (config_.repositories.empty()) return nullptr;
  registry_.set_starting(true);
  std::vector<RepositoryManager::Fixed> fixed;
  for (std::size_t i = 0; i < names_.names.size(); ++i) {
    fixed.emplace_back(names_.names[i], names_.versions[i]);
  }
  const auto load = [this, hashes = std::make_shared<FileHashes>()](
                        const std::string& path, const RepositoryManager::Progress& progress,
                        bool beside) {
    if (auto kept = kept_.take(path); kept.has_value()) return std::move(*kept);
    kept_.drop();
    LoadOptions options = load_options(config_, trusted_);
    options.file_hashes = hashes;
    options.load_timeout_s = 0;
    options.beside = beside;
    options.follow = config_.follow;
    std::atomic<double> share = 0;  // several threads may read
    options.progress = [&](double done) {
      share = done;
      progress(done);
    };
    options.answering = answering();
    const std::function<bool()> others = beside ? options.answering : nullptr;
    Pace copying(others, CLOCK_THREAD_CPUTIME_ID, kCopyingShare);
    if (beside) {
      options.pauses = [&others] {
        return [pace = std::make_shared<Pace>(others)] { pace->rest(); };
      };
      options.gpu.rest = [&copying] { copying.rest(); };
    }
    options.before_opening = [&](const PackageFile& file, const std::string& manifest_sha256) {
      trials_.try_package(file, manifest_sha256, others, [&] { progress(share); });
    };
    return load_package(path, options);
  };
  const auto warm_up = [this](const std::string& model, ServedModel& version) {
    const RecentRequests::Sample sample = recent_.of(model);
    if (sample.empty()) return;
    const WarmUpCounts counts = warm_up_with(sample, version, clock_);
    log_.info("warmed_up", {{"model", model},
                            {"version", version.version()},
                            {"answered", std::int64_t{counts.answered}},
                            {"unfit", std::int64_t{counts.unfit}},
                            {"failed", std::int64_t{counts.failed}}});
  };
  RepositoryManager::Listener listener{
      .serving = [this](const std::string& model, bool serving) { tell_serving(model, serving); },
      .gone =
          [this](const std::string& model) {
            grpc_.forget(model);
            recent_.forget(model);
          },
      .started = [this] { begin_to_serve(); },
      .left = [this](LoadedPackage package) { kept_.keep(std::move(package)); }};
  return std::make_unique<RepositoryManager>(
      config_, std::move(fixed), registry_, counters_, load, warm_up, std::move(listener), clock_,
      log_,
      FollowedVersion::Options{
          .trusted = config_.require_signature ? std::optional(trusted_) : std::nullopt,
          .verify_golden = config_.verify_golden});
}

std::function<bool()> Server::answering() const {
  return [this] { return admission_.active() > 0; };
}

void Server::load_all() {
  LoadOptions options = load_options(config_, trusted_);
  options.answering = answering();
  for (std::size_t i = 0; i < config_.models.size(); ++i) {
    const std::string& path = config_.models[i].path;
    log_.info("load",
              {{"model", names_.names[i]}, {"version", names_.versions[i]}, {"path", path}});
    LoadedPackage package = load_package(path, options);
    const double took = seconds(package.load_time);
    const auto steps = package.steps;
    const auto metrics = counters_.add(names_.names[i], names_.versions[i]);
    const auto model =
        std::make_shared<ServedModel>(std::move(package), config_, metrics, clock_, log_);
    registry_.publish(names_.names[i], model);
    metrics->ready = !draining_;
    tell_serving(names_.names[i], true);
    if (draining_) model->drain();
    log_.info("loaded",
              {{"model", names_.names[i]}, {"version", names_.versions[i]}, {"seconds", took}});
    for (const auto& [step, time] : steps) {
      log_.debug("load_step", {{"model", names_.names[i]},
                               {"version", names_.versions[i]},
                               {"step", step},
                               {"seconds", seconds(time)}});
    }
    model->log_file_hash();
  }
}

// Waits as SignalWaiter::wait does, for signals that end the server or its drain.
std::optional<int> Server::wait_for_stop(TimePoint until) {
  const std::optional<int> signal = signal_waiter_.wait(until);
  if (!signal.has_value()) return std::nullopt;
  switch (signals_.read(*signal, clock_.now())) {
    case SignalMeaning::kDrain:
    case SignalMeaning::kEnd: return signal;
    case SignalMeaning::kRepeat:
      log_.info("signal_repeated", {{"number", std::int64_t{*signal}}});
      return std::nullopt;
    case SignalMeaning::kReload: reload(*signal); return std::nullopt;
  }
  return std::nullopt;
}

void Server::reload(int signal) {
  const bool any = repository_ != nullptr || security_.has_files() || observer_.has_file();
  log_.info(any ? "reload" : "nothing_to_reload", {{"number", std::int64_t{signal}}});
  observer_.reopen();
  security_.read_again();
  if (repository_ != nullptr) repository_->rescan();
}

int Server::run() {
  open();
  loader_ = std::thread([this] {
    name_thread("loader");
    load();
  });
  std::optional<int> signal;
  while (!signal.has_value() && loading_ != Loading::kFailed) signal = wait_for_stop(kNever);
  if (loading_ == Loading::kFailed) {
    close();
    std::rethrow_exception(load_failure_);
  }
  log_.info("signal", {{"number", std::int64_t{*signal}}});
  // While nothing answers no call can be lost.
  const bool answers = loading_ != Loading::kRuns || !registry_.loaded().empty();
  const bool drained = !answers || drain();
  if (!drained || loading_ == Loading::kRuns) {
    // Workers may hold calls for as long as they like, whose clients have been given up; and torch
    // cannot be told to stop opening an archive, for which nobody waits any more.
    if (answers && drained) grpc_.stop(kFlush);
    log_.info("stop");
    log_.flush();
    observer_.flush();
    std::_Exit(drained ? 0 : 1);
  }
  close();
  log_.info("stop");
  return 0;
}

bool Server::drain() {
  const TimePoint begin = clock_.now();
  const TimePoint limit = begin + std::chrono::duration_cast<Duration>(
                                      std::chrono::duration<double>(config_.drain_limit_s));
  draining_ = true;
  if (repository_ != nullptr) repository_->begin_stop();
  for (const std::string& name : registry_.names()) grpc_.set_serving(name, false);
  grpc_.set_serving("", false);
  for (const auto& model : registry_.loaded()) model->metrics().ready = false;
  log_.info("drain", {{"active", admission_.active()}, {"limit_s", config_.drain_limit_s}});

  const auto forced = [&] {
    log_.error("forced", {{"unanswered", admission_.active()}});
    return false;
  };
  const TimePoint refuse_from = begin + std::chrono::milliseconds(config_.drain_propagation_ms);
  while (clock_.now() < refuse_from) {
    if (wait_for_stop(refuse_from).has_value()) return forced();
  }
  admission_.shut();
  grpc_.announce_end();
  http_->announce_end();
  for (const auto& model : registry_.loaded()) model->drain();
  while (admission_.active() > 0) {
    if (clock_.now() >= limit) {
      log_.error("drain_limit_passed", {{"unanswered", admission_.active()}});
      return false;
    }
    if (wait_for_stop(limit).has_value()) return forced();
  }
  for (int i = 0; i < kQuietTries; ++i) {
    const std::uint64_t refused = admission_.refused();
    const TimePoint until = clock_.now() + kQuiet;
    while (clock_.now() < until) {
      if (wait_for_stop(until).has_value()) return forced();
    }
    if (admission_.refused() == refused) break;
  }
  return true;
}

void Server::close() {
  if (loader_.joinable()) loader_.join();
  TableMemory::give_back_at_once();
  if (rest_ != nullptr) rest_->stop();
  if (repository_ != nullptr) repository_->stop();
  grpc_.stop(draining_ ? kFlush : Duration::zero());
  // Every call has its answer or is one; then nothing touches the queues any more.
  for (const auto& model : registry_.loaded()) model->close();
  grpc_.release();
  http_.reset();
  rest_.reset();
}

}  // namespace tessera
