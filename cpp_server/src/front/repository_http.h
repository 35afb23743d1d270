// The calls about repositories over HTTP: POST /v2/repository/index and
// /v2/repository/models/NAME/load and .../unload, with JSON bodies; docs/repository.md has them.
//
// Contract: any thread; nothing blocks. `control` may be null (the server has no repository), and
// outlives every call of `done`.
#pragma once

#include <string>

#include "front/http_page.h"
#include "repository/control.h"

namespace tessera {

void answer_repository_post(RepositoryControl* control, const std::string& path,
                            const std::string& body, HttpDone done);

// The HTTP status that stands for an outcome.
int http_status_of(Code code);

}  // namespace tessera
