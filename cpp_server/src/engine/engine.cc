#include "engine/engine.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <exception>
#include <filesystem>
#include <limits>
#include <utility>

#include "common/nearest.h"
#include "common/text.h"

namespace tessera {
namespace {

// The server's flags that mean something without its ports, its repositories and its signals.
constexpr std::array<std::string_view, 19> kFlags = {"allow-op",
                                                     "gpus",
                                                     "log-format",
                                                     "log-level",
                                                     "max-batch-ids",
                                                     "max-batch-samples",
                                                     "max-delay-us",
                                                     "max-inflight-bytes",
                                                     "max-queue-requests",
                                                     "max-queue-samples",
                                                     "max-request-ids",
                                                     "max-request-samples",
                                                     "ops-dir",
                                                     "public-key",
                                                     "require-signature",
                                                     "skip-golden",
                                                     "threads-per-worker",
                                                     "worker-niceness",
                                                     "workers"};

void check_flag(const std::string& word) {
  if (!word.starts_with("--")) {
    throw UsageError(text("'", word, "' is not a flag; give --NAME=VALUE or --NAME"));
  }
  const std::string name = word.substr(2, word.find('=') - 2);
  if (std::find(kFlags.begin(), kFlags.end(), name) != kFlags.end()) return;
  const std::string near = nearest(name, {kFlags.begin(), kFlags.end()});
  throw UsageError(
      text("--", name, ": is not a flag of the engine; ",
           near.empty() ? "docs/engine.md lists them" : text("did you mean --", near, "?")));
}

template <typename T>
Bytes bytes_of(const T* data, std::size_t count, std::size_t item_bytes = sizeof(T)) {
  return {reinterpret_cast<const std::byte*>(data), count * item_bytes};
}

Status check_array(std::string_view name, const void* data, std::size_t count) {
  if (data != nullptr || count == 0) return {};
  return Status::invalid(text(name, " is null, expected ", count, " numbers"));
}

Status check_group(std::string_view name, const tessera_engine_group& group) {
  if (group.value_count > 0 && group.value_bytes != 4 && group.value_bytes != 8) {
    return Status::invalid(
        text(name, ".value_bytes is ", group.value_bytes, ", expected 4 (int32) or 8 (int64)"));
  }
  Status status = check_array(text(name, ".lengths"), group.lengths, group.length_count);
  if (status.ok()) status = check_array(text(name, ".values"), group.values, group.value_count);
  if (status.ok()) status = check_array(text(name, ".weights"), group.weights, group.weight_count);
  return status;
}

void view_group(const tessera_engine_group& group, std::size_t features, SparseFeaturesView& view) {
  view.num_features = static_cast<std::int32_t>(features);
  view.lengths = bytes_of(group.lengths, group.length_count);
  const std::size_t width = group.value_bytes == 8 ? 8 : 4;
  (width == 8 ? view.values_int64 : view.values) =
      bytes_of(static_cast<const std::byte*>(group.values), group.value_count, width);
  view.weights = bytes_of(group.weights, group.weight_count);
}

std::size_t array_bytes(const tessera_engine_group& group) {
  return group.length_count * sizeof(std::int32_t) + group.weight_count * sizeof(float) +
         group.value_count * static_cast<std::size_t>(group.value_bytes);
}

}  // namespace

ServerConfig engine_config(const std::string& path, const std::vector<std::string>& words) {
  // Absolute, so that no part of it is taken for a name. There are no messages, for which
  // --max-inflight-bytes would have to have room.
  std::vector<std::string> arguments = {
      "--model=" + std::filesystem::absolute(path).lexically_normal().string(),
      "--max-message-bytes=1024"};
  for (const std::string& word : words) {
    check_flag(word);
    arguments.push_back(word);
  }
  return parse_flags(arguments);
}

void copy_text(std::string_view text, std::span<char> out) {
  if (out.empty()) return;
  std::size_t bytes = std::min(text.size(), out.size() - 1);
  // Bytes 10xxxxxx go on with a character.
  const auto inside = [&](std::size_t at) {
    return at < text.size() && (static_cast<unsigned char>(text[at]) & 0xC0U) == 0x80U;
  };
  while (bytes > 0 && inside(bytes)) --bytes;
  std::memcpy(out.data(), text.data(), bytes);
  out[bytes] = '\0';
}

// A request that was taken, until its completion is.
class Engine::Request final : public PendingRequest {
 public:
  Request(Engine& engine, std::span<float> scores, std::uint64_t tag)
      : engine_(engine), scores_(scores) {
    completion.tag = tag;
    completion.code = TESSERA_ENGINE_OK;
    completion.message[0] = '\0';
  }

  tessera_engine_completion completion;
  std::int64_t held_bytes = 0;  // of the budget
  Request* next = nullptr;

 private:
  void answer(std::span<const OutputView> outputs, const StageTimings& /*timings*/) override {
    float* out = scores_.data();
    for (const OutputView& output : outputs) out = std::copy_n(output.data, output.count, out);
    engine_.finish(*this);
  }

  void fail(const Refusal& refusal) override {
    completion.code = static_cast<std::int32_t>(refusal.status.code);
    copy_text(refusal.status.message, completion.message);
    engine_.finish(*this);
  }

  Engine& engine_;
  const std::span<float> scores_;
};

Engine::Engine(LoadedPackage package, const ServerConfig& config)
    : config_(config),
      log_(config.log_level, config.log_json),
      budget_(config.max_inflight_bytes),
      admission_([this] {
        const MutexLock lock(mutex_);
        empty_.notify_all();
      }) {
  manifest_ = package.manifest;
  for (const OutputSpec& output : manifest_.schema.outputs) scores_per_sample_ += output.width;
  plain_ = manifest_.schema.group_size(Group::kIdList);
  scored_ = manifest_.schema.group_size(Group::kIdScoreList);
  auto metrics = std::make_shared<ModelMetrics>(manifest_.name, manifest_.version);
  model_ =
      std::make_unique<ServedModel>(std::move(package), config_, std::move(metrics), clock_, log_);
}

Engine::~Engine() {
  close();
  Request* request = nullptr;
  {
    const MutexLock lock(mutex_);
    request = std::exchange(first_, nullptr);
  }
  while (request != nullptr) {
    const std::unique_ptr<Request> ended(request);
    request = ended->next;
  }
}

Status Engine::check(const tessera_engine_request& request, std::span<float> scores) const {
  Status status = check_array("dense", request.dense, request.dense_count);
  if (status.ok()) status = check_group("id_list", request.id_list);
  if (status.ok()) status = check_group("id_score_list", request.id_score_list);
  if (!status.ok()) return status;
  if (request.timeout_us < 0) {
    return Status::invalid(
        text("timeout_us is ", request.timeout_us, ", expected 0 (no limit) or more"));
  }
  // The numbers are divided, as a product could be more than a number holds.
  const auto width = static_cast<std::size_t>(scores_per_sample_);
  const auto samples = static_cast<std::size_t>(request.samples);
  if (request.samples <= 0) return {};  // the decoder refuses it
  if (scores.size() % width != 0 || scores.size() / width != samples || scores.data() == nullptr) {
    return Status::invalid(text("scores has room for ",
                                scores.data() == nullptr ? 0 : scores.size(), " numbers, expected ",
                                scores_per_sample_, " for each of ", request.samples, " samples"));
  }
  return {};
}

PredictionRequestView Engine::view(const tessera_engine_request& request) const {
  using Limits = std::numeric_limits<std::int32_t>;
  PredictionRequestView view;
  view.batch_size = static_cast<std::int32_t>(
      std::clamp<std::int64_t>(request.samples, Limits::min(), Limits::max()));
  view.float_features.num_features =
      static_cast<std::int32_t>(manifest().schema.dense_features.size());
  view.float_features.values = bytes_of(request.dense, request.dense_count);
  view_group(request.id_list, plain_, view.id_list_features);
  view_group(request.id_score_list, scored_, view.id_score_list_features);
  return view;
}

// Checks what the arrays hold, and takes their room.
Status Engine::take(const tessera_engine_request& request, Request& taken) {
  const TimePoint began = clock_.now();
  if (request.timeout_us > 0) {
    const std::chrono::microseconds timeout(request.timeout_us);
    const auto whole = std::chrono::floor<std::chrono::seconds>(timeout);
    taken.deadline = later(began, whole, timeout - whole);
  }
  taken.priority = request.priority;
  Status status = model_->decoder().decode(view(request), taken.request);
  if (!status.ok()) return status;
  const auto arrays = request.dense_count * sizeof(float) + array_bytes(request.id_list) +
                      array_bytes(request.id_score_list);
  const std::int64_t bytes = RequestBytes::kCall + static_cast<std::int64_t>(arrays) +
                             model_->request_bytes().samples_bytes(request.samples);
  if (bytes > budget_.limit()) {
    return Status::invalid(
        text("the request takes ", bytes, " bytes in the engine, the limit is ", budget_.limit()));
  }
  if (!budget_.take(bytes)) {
    return {Code::kResourceExhausted,
            text("the engine is full: requests in it take ", budget_.held(), " bytes (limit ",
                 budget_.limit(), "), this request brings ", bytes, "; try again later")};
  }
  taken.held_bytes = bytes;
  taken.decode = clock_.now() - began;
  return {};
}

// Being inside: so many times, until it is given up.
struct Engine::Entered {
  Entered(Admission& its_admission, std::int64_t times)
      : admission(its_admission), count(its_admission.enter(times) ? times : 0) {}
  ~Entered() { admission.leave(count); }
  Entered(const Entered&) = delete;
  Entered& operator=(const Entered&) = delete;

  Admission& admission;
  std::int64_t count;
};

// Requests that have been checked and go to the queue together.
struct Engine::Lot {
  static constexpr std::size_t kMost = 32;

  std::array<std::unique_ptr<Request>, kMost> requests;
  std::size_t count = 0;
};

Status Engine::add(const tessera_engine_submission& submission, Lot& lot) {
  const std::span<float> scores(submission.scores, submission.score_count);
  Status status = check(*submission.request, scores);
  if (!status.ok()) return status;
  auto request = std::make_unique<Request>(*this, scores, submission.tag);
  status = take(*submission.request, *request);
  if (status.ok()) lot.requests[lot.count++] = std::move(request);
  return status;
}

Status Engine::submit(std::span<const tessera_engine_submission> submissions, std::size_t& taken) {
  // This call is inside as long as it uses the model, and each request until it has finished.
  const Entered call(admission_, 1);
  const auto closed = [] { return Status{Code::kUnavailable, "the engine is closed"}; };
  if (call.count == 0) return closed();
  while (!submissions.empty()) {
    const std::size_t most = std::min(submissions.size(), Lot::kMost);
    Entered inside(admission_, static_cast<std::int64_t>(most));
    if (inside.count == 0) return closed();
    Lot lot;
    Status status;
    std::exception_ptr failure;  // is told when those before it are on their way
    try {
      while (status.ok() && lot.count < most) status = add(submissions[lot.count], lot);
    } catch (const std::bad_alloc&) {
      failure = std::current_exception();
    }
    std::array<PendingRequest*, Lot::kMost> requests{};
    for (std::size_t i = 0; i < lot.count; ++i) requests[i] = lot.requests[i].release();
    // finish leaves in their place, perhaps before the next line has returned.
    inside.count -= static_cast<std::int64_t>(lot.count);
    model_->submit(std::span(requests).first(lot.count));
    taken += lot.count;
    if (failure != nullptr) std::rethrow_exception(failure);
    if (!status.ok()) return status;
    submissions = submissions.subspan(lot.count);
  }
  return {};
}

void Engine::finish(Request& request) {
  bool wakes = false;
  {
    const MutexLock lock(mutex_);
    (first_ == nullptr ? first_ : last_->next) = &request;
    last_ = &request;
    wakes = waiting_ > 0;
  }
  if (wakes) finished_.notify_one();
  admission_.leave();
}

std::int64_t Engine::wait(std::span<tessera_engine_completion> completions,
                          std::int64_t timeout_us) {
  TimePoint until = kNever;
  if (timeout_us >= 0) {
    const std::chrono::microseconds timeout(timeout_us);
    const auto whole = std::chrono::floor<std::chrono::seconds>(timeout);
    until = later(clock_.now(), whole, timeout - whole);
  }
  if (completions.empty()) return 0;
  MutexLock lock(mutex_);
  while (first_ == nullptr) {
    if (closed_) return -1;
    if (clock_.now() >= until) return 0;
    ++waiting_;
    if (until == kNever) {
      finished_.wait(mutex_);
    } else {
      finished_.wait_until(mutex_, until);
    }
    --waiting_;
  }
  Request* request = first_;
  std::size_t count = 0;
  while (first_ != nullptr && count < completions.size()) {
    first_ = first_->next;
    ++count;
  }
  // Others that wait may not have been told of what is left.
  const bool more = first_ != nullptr && waiting_ > 0;
  lock.release();
  if (more) finished_.notify_one();
  for (tessera_engine_completion& completion : completions.first(count)) {
    const std::unique_ptr<Request> ended(request);
    request = ended->next;
    completion.tag = ended->completion.tag;
    completion.code = ended->completion.code;
    copy_text(ended->completion.message, completion.message);
    budget_.give(ended->held_bytes);
  }
  return static_cast<std::int64_t>(count);
}

void Engine::close() {
  std::call_once(closing_, [this] {
    admission_.shut();
    model_->drain();
    {
      const MutexLock lock(mutex_);
      while (admission_.active() > 0) empty_.wait(mutex_);
    }
    model_.reset();  // nobody is inside: its workers have nothing to do
    const MutexLock lock(mutex_);
    closed_ = true;
    finished_.notify_all();
  });
}

}  // namespace tessera
