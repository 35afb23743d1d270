// Golden answers: inputs and outputs recorded when the model was packaged. A machine on which
// the operators give other answers refuses the model instead of serving wrong scores.
//
// Contract: free functions; block while the model computes; the calling thread must have
// called Session::begin_thread. Throw std::runtime_error saying what does not hold.
#pragma once

#include <cstddef>
#include <functional>
#include <span>

#include "model/runner.h"
#include "package/manifest.h"

namespace tessera {

// Scores the inputs recorded in `content` (a safetensors file with "in.*" and "out.*") and
// compares: an answer y meets the recorded g when |y - g| <= atol + rtol * |g|. With `shared`, of a
// runner that shares rows, every second feature is given as rows.
void replay_golden(Session& session, const Manifest& manifest, std::span<const std::byte> content,
                   bool shared);

// Calls the model with zeros until its executor has settled; `shared` likewise. `rest`, if given,
// is called between two calls and may block.
void warm_up(Session& session, const InputSchema& schema, bool shared,
             const std::function<void()>& rest = nullptr);

}  // namespace tessera
