// The C API but for tessera_engine_open: calls of Engine, and texts in place of exceptions.
#include <exception>
#include <new>

#include "common/out_of_memory.h"
#include "engine/engine.h"
#include "server/version.h"

namespace {

constexpr const char* kNoMemory =
    "the process has no memory left for this request; try again later";

std::int32_t tell(const tessera::Status& status, std::span<char> message) {
  tessera::copy_text(status.message, message);
  return static_cast<std::int32_t>(status.code);
}

}  // namespace

std::int32_t tessera_engine_abi() { return TESSERA_ENGINE_ABI; }

const char* tessera_engine_version() { return tessera::kVersion; }

void tessera_engine_describe(const tessera_engine* engine, tessera_engine_facts* facts) {
  const tessera::Engine& model = engine->engine;
  const tessera::Manifest& manifest = model.manifest();
  const auto count = [](std::size_t number) { return static_cast<std::int64_t>(number); };
  *facts = {.model = manifest.name.c_str(),
            .version = manifest.version.c_str(),
            .device = manifest.device.c_str(),
            .dense_features = count(manifest.schema.dense_features.size()),
            .id_list_features = count(model.features(tessera::Group::kIdList)),
            .id_score_list_features = count(model.features(tessera::Group::kIdScoreList)),
            .outputs = count(manifest.schema.outputs.size()),
            .scores_per_sample = model.scores_per_sample()};
}

const char* tessera_engine_output(const tessera_engine* engine, std::int64_t index,
                                  std::int64_t* width) {
  const auto& outputs = engine->engine.manifest().schema.outputs;
  if (index < 0 || index >= static_cast<std::int64_t>(outputs.size())) return nullptr;
  const tessera::OutputSpec& output = outputs[static_cast<std::size_t>(index)];
  if (width != nullptr) *width = output.width;
  return output.name.c_str();
}

std::int32_t tessera_engine_submit(tessera_engine* engine, const tessera_engine_request* request,
                                   float* scores, std::size_t score_count, std::uint64_t tag,
                                   char* message, std::size_t message_bytes) {
  const tessera_engine_submission one = {
      .request = request, .scores = scores, .score_count = score_count, .tag = tag};
  std::int32_t code = TESSERA_ENGINE_OK;
  tessera_engine_submit_many(engine, &one, 1, &code, message, message_bytes);
  return code;
}

std::size_t tessera_engine_submit_many(tessera_engine* engine,
                                       const tessera_engine_submission* submissions,
                                       std::size_t count, std::int32_t* code, char* message,
                                       std::size_t message_bytes) {
  const std::span<char> out(message, message == nullptr ? 0 : message_bytes);
  std::size_t taken = 0;
  *code = TESSERA_ENGINE_OK;
  try {
    *code = tell(engine->engine.submit({submissions, count}, taken), out);
  } catch (const std::bad_alloc&) {
    tessera::copy_text(kNoMemory, out);
    *code = TESSERA_ENGINE_RESOURCE_EXHAUSTED;
  } catch (const std::exception& error) {
    tessera::copy_text(error.what(), out);
    *code = TESSERA_ENGINE_INTERNAL;
  }
  return taken;
}

std::int64_t tessera_engine_wait(tessera_engine* engine, tessera_engine_completion* completions,
                                 std::size_t capacity, std::int64_t timeout_us) {
  return engine->engine.wait({completions, capacity}, timeout_us);
}

void tessera_engine_close(tessera_engine* engine) { engine->engine.close(); }

void tessera_engine_free(tessera_engine* engine) { delete engine; }
