// A model for tests that need no torch: a plain function in its place.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <future>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "model/served_model.h"
#include "support.h"

namespace tessera::test {

// The score of a row is its first dense feature, and `offset` more.
class EchoSession final : public MemorySession {
 public:
  explicit EchoSession(float offset) : MemorySession(schema()), offset_(offset) {}

  std::unique_ptr<Scores> forward(const HostBatch& batch) override {
    class Echo final : public Scores {
     public:
      std::vector<float> values;
      std::span<const float> output(std::size_t) const override { return values; }
    };
    auto scores = std::make_unique<Echo>();
    for (std::size_t row = 0; row < static_cast<std::size_t>(batch.samples); ++row) {
      scores->values.push_back(batch.dense[2 * row] + offset_);
    }
    return scores;
  }

 private:
  const float offset_;
};

class EchoRunner final : public Runner {
 public:
  explicit EchoRunner(float offset) : offset_(offset) {}
  std::vector<std::string> devices() const override { return {"cpu"}; }
  std::unique_ptr<Session> open_session(std::size_t) override {
    return std::make_unique<EchoSession>(offset_);
  }
  std::vector<DeviceMemory> memory() const override { return {}; }

 private:
  const float offset_;
};

inline LoadedPackage echo_package(float offset = 0) {
  LoadedPackage package;
  package.path = "some/m.pt";
  package.manifest.schema = schema();
  package.manifest.device = "cpu";
  package.runner = std::make_unique<EchoRunner>(offset);
  package.file_hash = std::make_unique<FileHash>([](const std::stop_token&) { return "ab"; });
  return package;
}

// A request for the score of one sample.
class Scored final : public PendingRequest {
 public:
  void arrive(ServedModel& model, const RequestData& data) {
    ASSERT_TRUE(model.decoder().decode(data.view(), request).ok());
    model.submit(*this);
  }

  std::promise<float> score;

 private:
  void answer(std::span<const OutputView> outputs, const StageTimings&) override {
    score.set_value(outputs[0].data[0]);
  }
  void fail(const Refusal& refusal) override {
    ADD_FAILURE() << refusal.status.message;
    score.set_value(-1);
  }
};

}  // namespace tessera::test
