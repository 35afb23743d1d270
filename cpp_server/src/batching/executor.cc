#include "batching/executor.h"

#include <exception>
#include <memory>
#include <stdexcept>

#include "common/text.h"

namespace tessera {

Executor::Executor(const InputSchema& schema, Session& session, const Clock& clock,
                   ExecutionObserver& observer)
    : schema_(schema), session_(session), clock_(clock), observer_(observer), merger_(schema) {}

void Executor::execute(std::span<const Part> parts) {
  try {
    run(parts);
    return;
  } catch (const std::exception& failure) {
    if (parts.size() == 1) {
      parts[0].request->drop(observer_.on_failure(failure));
      return;
    }
    observer_.on_retry(parts.size(), failure.what());
  }
  for (const Part& part : parts) execute({&part, 1});
}

void Executor::run(std::span<const Part> parts) {
  PassTimings pass;
  pass.started = clock_.now();
  const Duration cpu_before = thread_cpu_time();
  const HostBatch batch = merger_.merge(parts, session_);
  const TimePoint assembled = clock_.now();
  const std::unique_ptr<Scores> scores = session_.forward(batch);
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
    part.request->deliver(part.index, views_, pass);
  }
  observer_.on_pass(pass, clock_.now() - pass.computed);
}

}  // namespace tessera
