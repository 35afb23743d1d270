// Golden answers: inputs and outputs recorded when the model was packaged. A machine on which
// the operators give other answers refuses the model instead of serving wrong scores.
//
// Contract: values and free functions; block while the model computes; the calling thread must have
// called Session::begin_thread. Throw std::runtime_error saying what does not hold.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "model/runner.h"
#include "package/schema.h"

namespace tessera {

// An answer y meets the recorded g when |y - g| <= atol + rtol * |g|; a NaN never does.
struct GoldenBounds {
  double atol = 0;
  double rtol = 0;
};

// One group of recorded inputs.
struct RecordedGroup {
  std::vector<std::int32_t> lengths;
  std::vector<std::int64_t> values;
  std::vector<float> weights;
};

class GoldenAnswers {
 public:
  // Reads `content`, a safetensors file with "in.*" and "out.*". `schema` must outlive this.
  GoldenAnswers(std::span<const std::byte> content, const InputSchema& schema);

  // Scores the recorded inputs and compares. With `shared`, of a runner that shares rows, every
  // second feature is given as rows.
  void replay(Session& session, const GoldenBounds& bounds, bool shared) const;

 private:
  const InputSchema* schema_;
  std::int64_t samples_ = 0;
  std::vector<float> dense_;
  RecordedGroup plain_;
  RecordedGroup scored_;
  std::vector<std::vector<float>> outputs_;  // in the schema's order
};

// Calls the model with zeros until its executor has settled; `shared` likewise.
void warm_up(Session& session, const InputSchema& schema, bool shared);

}  // namespace tessera
