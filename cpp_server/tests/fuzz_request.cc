// libFuzzer target: a request's way from bytes to a merged batch, in both protocols. Whatever the
// bytes are, the way must end in a refusal or in a batch whose sizes agree.
//
//   cpp_server/build.sh fuzz && build/cpp/fuzz/tests/fuzz_request -max_total_time=600
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <numeric>
#include <vector>

#include "batching/merger.h"
#include "batching/pending_request.h"
#include "request/decoder.h"
#include "request/infer_decoder.h"
#include "request/infer_wire.h"
#include "request/wire.h"
#include "support.h"

namespace {

using namespace tessera;

class FuzzedRequest final : public PendingRequest {
  void answer(std::span<const OutputView>, const StageTimings&) override {}
  void fail(const Refusal&) override {}
};

void require(bool holds) {
  if (!holds) std::abort();
}

void check(const HostGroup& group) {
  const auto ids = std::accumulate(group.lengths.begin(), group.lengths.end(), std::int64_t{0});
  require(ids == static_cast<std::int64_t>(group.values.size()));
  require(group.weights.empty() || group.weights.size() == group.values.size());
}

InputSchema fuzz_schema() {
  InputSchema made = test::schema();
  made.features.push_back(
      test::feature("row", Group::kIdList, Hashing::kNone, OutOfRange::kReject));
  made.features.push_back(
      test::feature("clamped", Group::kIdList, Hashing::kNone, OutOfRange::kClamp));
  made.outputs.push_back({"logits", 3});
  return made;
}

// Only its memory is used.
class FuzzSession final : public test::MemorySession {
 public:
  using MemorySession::MemorySession;
  std::unique_ptr<Scores> forward(const HostBatch&) override { return nullptr; }
};

// Every sample has a row, and the shared features have exactly that many bags.
void check_sharing(const HostBatch& batch) {
  if (batch.row_index.empty()) return;
  const auto shared = std::count(batch.shared.begin(), batch.shared.end(), 1);
  const auto own = static_cast<std::int64_t>(batch.shared.size()) - shared;
  const auto bags = static_cast<std::int64_t>(batch.id_list.lengths.size()) - own * batch.rows;
  require(shared > 0 && bags % shared == 0);
  for (const std::int32_t row : batch.row_index) require(row >= 0 && row < bags / shared);
}

void compute(FuzzedRequest& pending, Merger& into, FuzzSession& memory) {
  for (const std::int64_t max_samples : {std::int64_t{1'000}, std::int64_t{3}}) {
    const std::vector<Part> parts = cut_request(pending, 1, max_samples, 50);
    std::int64_t ids = 0;
    for (const Part& part : parts) {
      const HostBatch batch = into.merge({&part, 1}, memory);
      require(batch.samples == part.samples());
      check(batch.id_list);
      check_sharing(batch);
      require(static_cast<std::int64_t>(batch.id_list.ids() + batch.id_score_list.ids()) ==
              part.ids);
      check(batch.id_score_list);
      ids += static_cast<std::int64_t>(batch.id_list.ids() + batch.id_score_list.ids());
    }
    // Parts that share rows may each look up the same ones.
    require(pending.request.shared.any() ? ids >= 0 : ids == pending.request.ids);
  }
}

const InputSchema schema = fuzz_schema();
constexpr RequestLimits kLimits{.max_samples = 1'000, .max_ids = 20'000};
Merger merger(schema);
FuzzSession session(schema);

void predict(Bytes bytes) {
  static const RequestDecoder spreading(schema, kLimits);
  static const RequestDecoder sharing(schema, kLimits, /*shares_rows=*/true);
  PredictionRequestView view;
  if (!parse_request(bytes, view)) return;
  for (const RequestDecoder* decoder : {&spreading, &sharing}) {
    FuzzedRequest pending;
    if (decoder->decode(view, pending.request).ok()) compute(pending, merger, session);
  }
}

void model_infer(Bytes bytes) {
  static const InferDecoder decoder(schema, kLimits);
  static const RequestDecoder checks(schema, kLimits);
  InferRequestView view;
  if (!parse_infer(bytes, view)) return;
  InferOptions options;
  if (read_options(view, options).ok()) {
    require(options.priority >= 0 && options.timeout >= Duration::zero());
  }
  // A copy of a request, whose tensors in shared memory follow it, is read by the same code.
  for (const bool appended : {false, true}) {
    const InferRegions regions{.appended = appended};
    std::vector<std::size_t> chosen;
    if (decoder.choose_outputs(view, regions, chosen).ok()) {
      require(!chosen.empty() && chosen.size() <= schema.outputs.size());
    }
    InferStorage storage;
    PredictionRequestView tensors;
    if (!decoder.decode(view, regions, storage, tensors).ok()) continue;
    // Numbers of a group and a type each, of which there are no more than a request may have.
    require(storage.bytes() <= 8 * (2 * 1'000 + 6 * 1'000 + 3 * 20'000));
    FuzzedRequest pending;
    if (checks.decode(tensors, pending.request, kInferNames).ok()) {
      compute(pending, merger, session);
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const Bytes bytes(reinterpret_cast<const std::byte*>(data), size);
  predict(bytes);
  model_infer(bytes);
  return 0;
}
