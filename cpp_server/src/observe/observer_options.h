// What an operator may say of what is told of single calls: docs/observe.md.
//
// Contract: plain values.
#pragma once

#include <string>

#include "recording/record_options.h"

namespace tessera {

struct ObserverOptions {
  std::string access_log = {};     // a file, or "-" for the standard output; empty: none
  std::string otlp_endpoint = {};  // the address of a collector; empty: no call is traced
  std::string otlp_ca = {};  // a PEM file with the collector's authorities; empty: the system's
  std::string otlp_headers_file = {};  // a file of headers for the collector; empty: none
  double trace_share = 0.01;           // of the calls without a traceparent, 0 to 1
  RecordOptions record = {};
};

}  // namespace tessera
