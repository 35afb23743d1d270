// Scores over REST: a ModelInferResponse as JSON, with or without binary data behind it.
//
// A score in JSON is the shortest decimal number that names, as a double, the same number as the
// model's float32: readers that know doubles alone get the same bits. What is not a finite number
// is null there.
//
// Contract: a free function without state; any thread.
#pragma once

#include <string_view>

#include "front/http_page.h"
#include "front/rest_request.h"

namespace tessera {

// The answer that `message`, a serialised ModelInferResponse, is.
HttpAnswer rest_answer(std::string_view message, const RestEncodings& encodings);

}  // namespace tessera
