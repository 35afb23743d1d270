// Golden answers: inputs and outputs recorded when the model was packaged. A machine on which
// the operators give other answers refuses the model instead of serving wrong scores.
//
// Contract: values and free functions; block while the model computes; the calling thread must have
// called Session::begin_thread. Throw std::runtime_error saying what does not hold.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
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

// `message`, what warm_up or replay threw, as one line. What TorchScript says of an error that its
// code raised stands in the last one, behind its trace.
std::string one_line(std::string message);

// Calls the model with zeros until its executor has settled; `shared` likewise. `rest`, if given,
// is called between two calls and may block.
void warm_up(Session& session, const InputSchema& schema, bool shared,
             const std::function<void()>& rest = nullptr);

}  // namespace tessera
