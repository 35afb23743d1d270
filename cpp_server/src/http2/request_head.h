// What the headers of one request say, as far as a gRPC server asks.
//
// Contract: plain state of one thread, used again for every request of a connection: header blocks
// never mix. It borrows the method from the table.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "common/clock.h"
#include "common/status.h"
#include "http2/grpc_wire.h"
#include "http2/method_table.h"

namespace tessera::http2 {

// What is kept of an x-request-id: as much as a traffic key may have.
inline constexpr std::size_t kMaxRequestIdBytes = 1'024;
// And of a traceparent.
inline constexpr std::size_t kMaxTraceParentBytes = 256;

class RequestHead {
 public:
  void clear();
  void add(std::string_view name, std::string_view value, const MethodTable& methods);

  // Names and values, each pair counted with 32 bytes more.
  std::size_t bytes() const { return bytes_; }

  // The HTTP status of a request that is not one of gRPC's; 0 where it is.
  int http_status() const;

  // Why the call cannot be answered. If it can, its deadline, counted from `now`, and its method.
  Status check(TimePoint now, TimePoint& deadline) const;
  Method* method() const { return method_; }
  Encoding encoding() const { return encoding_; }

  // Whether a CallGate is asked; it is of unknown methods, too. And the first authorization header
  // that it is asked with; empty: there is none.
  bool guarded() const { return method_ == nullptr || method_->guarded(); }
  std::string_view authorization() const { return authorization_; }

  // The first x-request-id, as far as kMaxRequestIdBytes go; empty: there is none.
  std::string_view request_id() const { return request_id_; }

  // The first traceparent, as far as kMaxTraceParentBytes go; empty: there is none.
  std::string_view traceparent() const { return traceparent_; }

 private:
  std::size_t bytes_ = 0;
  bool post_ = false;
  bool grpc_ = false;
  bool trailers_ = false;
  Method* method_ = nullptr;
  Encoding encoding_ = Encoding::kIdentity;
  std::string request_id_;
  std::string traceparent_;
  std::string authorization_;
  // What is said of a request that is refused; empty otherwise.
  std::string unknown_path_;
  std::string unknown_encoding_;
  std::string timeout_;
};

}  // namespace tessera::http2
