// POSTs to a collector of spans, over TLS where its address says so.
//
// Each POST has a connection of its own, which ends with it: there is one a second at most while
// the collector keeps up, and what has become of an old connection need not be asked.
//
// The authorities that a certificate is held against are read once, when the client is made; the
// file of headers is read for each POST, so that a token may be exchanged.
//
// Contract: post blocks, for as long as it is told, and for as long as the system takes to resolve
// a name; one thread at a time.
#pragma once

#include <chrono>
#include <stdexcept>
#include <string>
#include <string_view>

#include "common/clock.h"
#include "http2/tls_session.h"
#include "observe/collector.h"

namespace tessera {

// There was no answer that HTTP knows.
class NoAnswer : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct CollectorAnswer {
  int status = 0;
  std::chrono::seconds retry_after{0};
  std::string body = {};  // as much as is looked at
};

// What an answer's head and body say. Nothing is thrown for what a collector sends but NoAnswer.
CollectorAnswer read_answer(std::string_view received);

class CollectorClient {
 public:
  // `ca` is a PEM file with authorities; empty: the system's. `headers_file` as
  // read_collector_headers takes it; empty: there is none. Throws UsageError where one of them
  // has to be changed.
  explicit CollectorClient(Collector collector, const std::string& ca = "",
                           std::string headers_file = "");

  const std::string& url() const { return collector_.url; }

  // Throws NoAnswer, also where `until` comes before the whole answer, or std::bad_alloc.
  CollectorAnswer post(std::string_view before, std::string_view body, std::string_view after,
                       TimePoint until) const;

 private:
  Collector collector_;
  http2::TlsContext tls_;  // null: connections are not encrypted
  std::string headers_file_;
};

}  // namespace tessera
