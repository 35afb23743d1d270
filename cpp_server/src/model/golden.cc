#include "model/golden.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "common/text.h"
#include "package/safetensors.h"
#include "request/packed.h"

namespace tessera {
namespace {

// TorchScript's executor plans anew for the first calls it sees: it profiles one, optimizes
// at the second, and the third is the steady state.
constexpr int kWarmUpCalls = 3;
constexpr std::int64_t kWarmUpBatchSizes[] = {1, 2, 8, 64};

using Tensors = std::map<std::string, TensorView>;

const TensorView& tensor_at(const Tensors& tensors, std::string_view name) {
  const auto found = tensors.find(std::string(name));
  if (found == tensors.end()) {
    throw std::runtime_error(text("golden.bin lacks tensor '", name, "'"));
  }
  return found->second;
}

template <typename T>
std::vector<T> numbers(const TensorView& view, const char* dtype) {
  if (view.dtype != dtype) {
    throw std::runtime_error(text("golden.bin: expected ", dtype, ", found ", view.dtype));
  }
  std::vector<T> values(view.bytes.size() / sizeof(T));
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = load<T>(view.bytes.data(), i);
  return values;
}

RecordedGroup read_group(const Tensors& tensors, const std::string& prefix, bool weighted) {
  RecordedGroup group;
  group.lengths = numbers<std::int32_t>(tensor_at(tensors, prefix + "_lengths"), "I32");
  const TensorView& ids = tensor_at(tensors, prefix + "_values");
  if (ids.dtype == "I32") {
    for (const std::int32_t id : numbers<std::int32_t>(ids, "I32")) group.values.push_back(id);
  } else {
    group.values = numbers<std::int64_t>(ids, "I64");
  }
  if (weighted) group.weights = numbers<float>(tensor_at(tensors, prefix + "_weights"), "F32");
  return group;
}

// `recorded` of `samples` samples into a batch's rows.
void fill(const HostGroup& group, const RecordedGroup& recorded, const HostBatch& batch) {
  const auto samples = static_cast<std::size_t>(batch.samples);
  const auto rows = static_cast<std::size_t>(batch.rows);
  const std::size_t features = recorded.lengths.size() / samples;
  if (features * samples != recorded.lengths.size() || group.lengths.size() != features * rows ||
      group.ids() != recorded.values.size() || group.weights.size() < recorded.weights.size()) {
    throw std::runtime_error("golden.bin: its inputs do not fit the schema");
  }
  std::fill(group.lengths.begin(), group.lengths.end(), 0);
  for (std::size_t f = 0; f < features; ++f) {
    std::copy_n(recorded.lengths.data() + f * samples, samples, group.lengths.data() + f * rows);
  }
  std::copy(recorded.values.begin(), recorded.values.end(), group.values.begin());
  std::copy(recorded.weights.begin(), recorded.weights.end(), group.weights.begin());
}

// With `shared`, every second feature is given as rows that each are used once: the same batch by
// the model's other method.
std::unique_ptr<Scores> score(Session& session, std::int64_t samples,
                              const std::vector<float>& dense, const RecordedGroup& plain,
                              const RecordedGroup& scored, bool shared) {
  const auto features = static_cast<std::int64_t>(plain.lengths.size()) / samples;
  const HostBatch batch =
      session.reserve({.samples = samples,
                       .plain_ids = static_cast<std::int64_t>(plain.values.size()),
                       .scored_ids = static_cast<std::int64_t>(scored.values.size()),
                       .shared_features = shared ? (features + 1) / 2 : 0,
                       .shared_rows = shared ? samples : 0});
  for (std::size_t f = 0; f < batch.shared.size(); ++f) batch.shared[f] = f % 2 == 0 ? 1 : 0;
  std::iota(batch.row_index.begin(), batch.row_index.end(), 0);
  std::fill(batch.dense.begin(), batch.dense.end(), 0.0F);
  std::copy(dense.begin(), dense.end(), batch.dense.begin());
  fill(batch.id_list, plain, batch);
  fill(batch.id_score_list, scored, batch);
  return session.forward(batch);
}

void compare(const OutputSpec& output, std::span<const float> found,
             const std::vector<float>& golden, const GoldenBounds& bounds) {
  if (found.size() != golden.size()) {
    throw std::runtime_error(text("does not give its golden answers: output '", output.name,
                                  "' has ", found.size(), " numbers, recorded were ",
                                  golden.size()));
  }
  for (std::size_t i = 0; i < golden.size(); ++i) {
    const double bound = bounds.atol + bounds.rtol * std::abs(golden[i]);
    // Written so that a NaN fails.
    if (!(std::abs(double{found[i]} - double{golden[i]}) <= bound)) {
      throw std::runtime_error(text("does not give its golden answers: output '", output.name,
                                    "' of golden sample ",
                                    i / static_cast<std::size_t>(output.width), " is ", found[i],
                                    ", recorded was ", golden[i]));
    }
  }
}

}  // namespace

GoldenAnswers::GoldenAnswers(std::span<const std::byte> content, const InputSchema& schema)
    : schema_(&schema) {
  Tensors tensors;
  try {
    tensors = read_safetensors(content);
  } catch (const std::invalid_argument& error) {
    throw std::runtime_error(text("golden.bin cannot be read: ", error.what()));
  }
  const TensorView& dense = tensor_at(tensors, "in.float_features");
  dense_ = numbers<float>(dense, "F32");
  const auto dense_features = static_cast<std::int64_t>(schema.dense_features.size());
  if (dense.shape.size() != 2 || dense.shape[0] < 1 || dense.shape[1] != dense_features) {
    throw std::runtime_error("golden.bin: in.float_features does not fit the schema");
  }
  samples_ = dense.shape[0];
  plain_ = read_group(tensors, "in.id_list_features", /*weighted=*/false);
  scored_ = read_group(tensors, "in.id_score_list_features", /*weighted=*/true);
  for (const OutputSpec& output : schema.outputs) {
    outputs_.push_back(numbers<float>(tensor_at(tensors, "out." + output.name), "F32"));
    // Before anything is made for so many samples: without dense features they take no bytes.
    const auto width = static_cast<std::size_t>(output.width);
    if (outputs_.back().size() % width != 0 ||
        outputs_.back().size() / width != static_cast<std::size_t>(samples_)) {
      throw std::runtime_error(text("golden.bin: out.", output.name, " has ",
                                    outputs_.back().size(), " numbers, not ", width,
                                    " for each of ", samples_, " samples"));
    }
  }
}

void GoldenAnswers::replay(Session& session, const GoldenBounds& bounds, bool shared) const {
  const auto scores = score(session, samples_, dense_, plain_, scored_, shared);
  for (std::size_t i = 0; i < outputs_.size(); ++i) {
    compare(schema_->outputs[i], scores->output(i), outputs_[i], bounds);
  }
}

std::string one_line(std::string message) {
  constexpr const char* kTrace = "The following operation failed in the TorchScript interpreter.";
  const bool traced = message.starts_with(kTrace);
  while (!message.empty() && (message.back() == '\n' || message.back() == ' ')) message.pop_back();
  if (message.empty()) return "its model cannot be called";
  if (!traced) return message.substr(0, message.find('\n'));
  return "cannot be called: " + message.substr(message.rfind('\n') + 1);
}

void warm_up(Session& session, const InputSchema& schema, bool shared,
             const std::function<void()>& rest) {
  for (const std::int64_t samples : kWarmUpBatchSizes) {
    for (int call = 0; call < kWarmUpCalls; ++call) {
      const auto B = static_cast<std::size_t>(samples);
      const auto group = [&](Group kind, bool weighted) {
        // One id per bag.
        const std::size_t bags = B * schema.group_size(kind);
        return RecordedGroup{std::vector<std::int32_t>(bags, 1), std::vector<std::int64_t>(bags),
                             std::vector<float>(weighted ? bags : 0)};
      };
      score(session, samples, std::vector<float>(B * schema.dense_features.size()),
            group(Group::kIdList, false), group(Group::kIdScoreList, true), shared);
      if (rest != nullptr) rest();
    }
  }
}

}  // namespace tessera
