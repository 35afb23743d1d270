// A collector of spans: where it is, and what it is told beside them.
//
// Contract: free functions without state; any thread. read_collector_headers blocks on the file
// system.
#pragma once

#include <string>
#include <string_view>

namespace tessera {

struct Collector {
  std::string url;        // as it was given
  std::string host = {};  // without brackets
  std::string port = {};
  std::string authority = {};  // for the header Host
  std::string path = {};       // with /v1/traces
  bool encrypted = false;      // by TLS
};

// Reads the value of --otlp-endpoint: http://HOST[:PORT][/PATH] or https://HOST[:PORT][/PATH];
// where there is no port, 4318 is meant by http, and 443 by https. Throws FlagError.
Collector read_collector(const std::string& url);

// Reads the content of the file of --otlp-headers-file:
//
//   # what follows '#' at the start of a line is not read
//   NAME: VALUE
//
// Returns the headers as a request has them, each line with its end. A name is a token of HTTP and
// given once, and none of those that a request has anyhow; a value is printable ASCII.
// tests/server/collector_header_cases.json holds this reader and the Python server's to one table.
// Throws UsageError, whose text is one line that names the line of the file and quotes no value.
std::string parse_collector_headers(std::string_view content);

// The same of a file, which the text names, too.
std::string read_collector_headers(const std::string& path);

}  // namespace tessera
