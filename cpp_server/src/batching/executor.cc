#include "batching/executor.h"

#include <exception>
#include <memory>
#include <new>
#include <stdexcept>

#include "common/text.h"

namespace tessera {

Executor::Executor(const InputSchema& schema, Session& session, const Clock& clock,
                   ExecutionObserver& observer, CommitLock* commits)
    : schema_(schema),
      session_(session),
      clock_(clock),
      observer_(observer),
      merger_(schema),
      commits_(commits) {}

void Executor::execute(std::span<const Part> parts) {
  execute(parts, Inside::kNo);
  while (!mixed_.empty()) {
    PendingRequest& request = *mixed_.back();
    mixed_.pop_back();
    compute_again(request);
  }
}

void Executor::execute(std::span<const Part> parts, Inside inside) {
  try {
    run(parts, inside);
    return;
  } catch (const std::exception& failure) {
    if (parts.size() == 1) {
      parts[0].request->drop(observer_.on_failure(failure));
      return;
    }
    observer_.on_retry(parts.size(), failure.what());
  }
  for (const Part& part : parts) execute({&part, 1}, inside);
}

void Executor::compute_again(PendingRequest& request) {
  std::vector<Part> parts;
  try {
    request.expect_parts(1, 0);  // so that it can be dropped
    parts = observer_.cut_again(request);
  } catch (const std::bad_alloc&) {
    request.drop(out_of_memory_refusal());
    return;
  }
  const SharedHold hold(commits_ == nullptr ? nullptr : &commits_->lock);
  for (const Part& part : parts) execute({&part, 1}, Inside::kYes);
}

void Executor::run(std::span<const Part> parts, Inside inside) {
  PassTimings pass;
  pass.started = clock_.now();
  const Duration cpu_before = thread_cpu_time();
  const HostBatch batch = merger_.merge(parts, session_);
  const TimePoint assembled = clock_.now();
  mixed_.reserve(mixed_.size() + parts.size());
  std::unique_ptr<Scores> scores;
  {
    const SharedHold hold(commits_ == nullptr || inside == Inside::kYes ? nullptr
                                                                        : &commits_->lock);
    if (commits_ != nullptr) pass.commit = commits_->commit;
    scores = session_.forward(batch);
  }
  pass.computed = clock_.now();
  pass.cpu = thread_cpu_time() - cpu_before;
  pass.assemble = assembled - pass.started;
  pass.transfer = scores->transfer();
  pass.forward = pass.computed - assembled - pass.transfer;
  pass.requests = static_cast<std::int64_t>(parts.size());
  pass.samples = batch.samples;
  pass.ids = static_cast<std::int64_t>(batch.id_list.ids() + batch.id_score_list.ids());

  // Checked before the first part is delivered: what throws must not have answered anybody.
  std::vector<const float*> rows;
  for (std::size_t i = 0; i < schema_.outputs.size(); ++i) {
    const OutputSpec& output = schema_.outputs[i];
    const std::span<const float> values = scores->output(i);
    if (values.size() != static_cast<std::size_t>(batch.samples * output.width)) {
      throw std::runtime_error(text("output '", output.name, "' has ", values.size(),
                                    " numbers, the schema promises ", batch.samples, " samples by ",
                                    output.width));
    }
    rows.push_back(values.data());
  }
  views_.resize(schema_.outputs.size());
  // Nothing throws from here on: a part that cannot be delivered fails by itself.
  for (const Part& part : parts) {
    for (std::size_t i = 0; i < views_.size(); ++i) {
      const auto count = static_cast<std::size_t>(part.samples() * schema_.outputs[i].width);
      views_[i] = {schema_.outputs[i].name, rows[i], count};
      rows[i] += count;
    }
    if (!part.request->deliver(part.index, views_, pass)) mixed_.push_back(part.request);
  }
  observer_.on_pass(pass, clock_.now() - pass.computed);
  observer_.on_scores(*scores, batch.samples);
}

}  // namespace tessera
