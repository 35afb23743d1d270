// Holds callers of both ports to the tokens of a file.
//
// Contract: any thread may call admit, which does not block; read_again belongs to one thread at a
// time. The metrics and the clock outlive it.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "common/clock.h"
#include "common/published.h"
#include "http2/call_gate.h"
#include "metrics/security_metrics.h"
#include "security/token_table.h"

namespace tessera {

class Authorizer final : public http2::CallGate {
 public:
  // Reads `path`. Throws UsageError where it has to be changed.
  Authorizer(std::string path, SecurityMetrics& metrics, const Clock& clock);

  // UNAUTHENTICATED or RESOURCE_EXHAUSTED, where it is not OK.
  Status admit(std::string_view authorization) override;

  // Reads the file again; returns how many tokens it has. Throws UsageError where it has to be
  // changed: the tokens are those of before.
  std::size_t read_again();

 private:
  Status refused(TokenRefusal why, Code code, std::string message);

  const std::string path_;
  SecurityMetrics& metrics_;
  const Clock& clock_;
  Published<TokenTable> tokens_;
};

}  // namespace tessera
