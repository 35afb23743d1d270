// The outcome of an operation that can fail because of what a client or a user gave.
//
// Contract: plain values; no ownership beyond the strings, any thread, nothing blocks.
#pragma once

#include <string>
#include <string_view>
#include <utility>

namespace tessera {

// The statuses that a server answers with. The numbers are gRPC's own, so that the RPC layer
// converts by a cast.
enum class Code {
  kOk = 0,
  kCancelled = 1,
  kInvalidArgument = 3,
  kDeadlineExceeded = 4,
  kNotFound = 5,
  kAlreadyExists = 6,
  kResourceExhausted = 8,
  kFailedPrecondition = 9,
  kUnimplemented = 12,
  kInternal = 13,
  kUnavailable = 14,
  kUnauthenticated = 16,
};

// The name in gRPC's own spelling, as it appears in metrics ("INVALID_ARGUMENT").
std::string_view code_name(Code code);

struct [[nodiscard]] Status {
  Code code = Code::kOk;
  std::string message;

  bool ok() const { return code == Code::kOk; }
  static Status invalid(std::string message) {
    return {Code::kInvalidArgument, std::move(message)};
  }
};

}  // namespace tessera
