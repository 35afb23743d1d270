// A collector of spans over HTTP: where it is, and one POST to it.
//
// Each POST has a connection of its own, which ends with it: there is one a second at most while
// the collector keeps up, and what has become of an old connection need not be asked.
// Without TLS: a collector on the same host, or in the same pod, passes spans on over it.
//
// Contract: plain values; post_json blocks, for as long as it is told, and for as long as the
// system takes to resolve a name.
#pragma once

#include <chrono>
#include <stdexcept>
#include <string>
#include <string_view>

#include "common/clock.h"

namespace tessera {

struct Collector {
  std::string url;        // as it was given
  std::string host = {};  // without brackets
  std::string port = {};
  std::string authority = {};  // for the header Host
  std::string path = {};       // with /v1/traces
};

// Reads the value of --otlp-endpoint: http://HOST[:PORT][/PATH], port 4318 where there is none.
// Throws FlagError.
Collector read_collector(const std::string& url);

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

// Throws NoAnswer, also where `until` comes before the whole answer, or std::bad_alloc.
CollectorAnswer post_json(const Collector& collector, std::string_view before,
                          std::string_view body, std::string_view after, TimePoint until);

// What an answer's head and body say. Nothing is thrown for what a collector sends but NoAnswer.
CollectorAnswer read_answer(std::string_view received);

}  // namespace tessera
