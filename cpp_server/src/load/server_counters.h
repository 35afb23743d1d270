// What a server has counted since it began, as its HTTP port's /metrics tells it.
//
// Contract: free functions without state; reading blocks, for ten seconds at most.
#pragma once

#include <stdexcept>
#include <string>
#include <string_view>

#include "load/address.h"

namespace tessera {

struct ServerCounters {
  std::string server;   // cpp or python
  std::string version;  // of the server
  double cpu_seconds = 0;
  double batches = 0;
  double batch_requests = 0;  // sums over the batches
  double batch_samples = 0;
};

// The counters could not be read; what() says why, in a line.
class CountersError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// `page` is in Prometheus' text format. Throws CountersError where a counter is missing.
ServerCounters parse_counters(std::string_view page);

// `authorization` is the header that shows a token; empty: none. Throws CountersError.
ServerCounters read_counters(const Address& http, const std::string& authorization);

}  // namespace tessera
