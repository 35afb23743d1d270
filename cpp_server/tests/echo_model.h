// A model for tests that need no torch: a plain function in its place.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "model/served_model.h"
#include "support.h"

namespace tessera::test {

// The score of a row is its first dense feature.
class EchoSession final : public MemorySession {
 public:
  EchoSession() : MemorySession(schema()) {}

  std::unique_ptr<Scores> forward(const HostBatch& batch) override {
    class Echo final : public Scores {
     public:
      std::vector<float> values;
      std::span<const float> output(std::size_t) const override { return values; }
    };
    auto scores = std::make_unique<Echo>();
    for (std::size_t row = 0; row < static_cast<std::size_t>(batch.samples); ++row) {
      scores->values.push_back(batch.dense[2 * row]);
    }
    return scores;
  }
};

class EchoRunner final : public Runner {
 public:
  std::vector<std::string> devices() const override { return {"cpu"}; }
  std::unique_ptr<Session> open_session(std::size_t) override {
    return std::make_unique<EchoSession>();
  }
  std::vector<DeviceMemory> memory() const override { return {}; }
};

inline LoadedPackage echo_package() {
  LoadedPackage package;
  package.path = "some/m.pt";
  package.manifest.schema = schema();
  package.manifest.device = "cpu";
  package.runner = std::make_unique<EchoRunner>();
  package.file_hash = std::make_unique<FileHash>([](const std::stop_token&) { return "ab"; });
  return package;
}

}  // namespace tessera::test
