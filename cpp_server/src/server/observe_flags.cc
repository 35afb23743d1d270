#include "server/observe_flags.h"

#include <string>

#include "common/text.h"
#include "observe/collector.h"

namespace tessera {

std::vector<Flag> observe_flags(ServerConfig& config) {
  return {
      {"access-log", "FILE",
       "a file that gets a line of JSON for each call for scores, with the peer's address, the "
       "model "
       "and how the call ended; -: the standard output; SIGHUP opens the file anew, "
       "docs/observe.md "
       "(default: none)",
       [&](const std::string& value) { config.observer.access_log = value; }},
      {"otlp-endpoint", "URL",
       "an OpenTelemetry collector, http://HOST:PORT or https://HOST:PORT, that gets spans of "
       "calls "
       "for scores by OTLP over HTTP, docs/observe.md (default: none, no call is traced)",
       [&](const std::string& value) {
         static_cast<void>(read_collector(value));
         config.observer.otlp_endpoint = value;
       }},
      {"otlp-ca", "FILE",
       "authorities in PEM, one of which must have signed the certificate of an --otlp-endpoint "
       "https://HOST:PORT (default: those of the system)",
       [&](const std::string& value) { config.observer.otlp_ca = value; }},
      {"otlp-headers-file", "FILE",
       "headers of the requests to --otlp-endpoint, such as a token: NAME: VALUE on each line; "
       "read "
       "anew for each request, docs/observe.md (default: none)",
       [&](const std::string& value) { config.observer.otlp_headers_file = value; }},
      {"trace-share", "SHARE",
       text("with --otlp-endpoint, the share of the calls without a traceparent that are traced, 0 "
            "to 1; those with one are where it says that it is sampled (default: ",
            config.observer.trace_share, ")"),
       [&](const std::string& value) {
         const auto share = parse_number<double>("trace-share", value);
         // Written so that a NaN is refused.
         if (!(share >= 0 && share <= 1)) {
           refuse_flag("trace-share", value, "give a share from 0 to 1");
         }
         config.observer.trace_share = share;
       }},
  };
}

void check_observing(const ServerConfig& config) {
  const ObserverOptions& observer = config.observer;
  const bool encrypted =
      !observer.otlp_endpoint.empty() && read_collector(observer.otlp_endpoint).encrypted;
  if (!observer.otlp_ca.empty() && !encrypted) {
    refuse_flag("otlp-ca", "'" + observer.otlp_ca + "'",
                "only a collector that is asked by TLS has a certificate; give --otlp-endpoint "
                "https://HOST:PORT");
  }
  if (!observer.otlp_headers_file.empty() && observer.otlp_endpoint.empty()) {
    refuse_flag("otlp-headers-file", "'" + observer.otlp_headers_file + "'",
                "there is no collector that would get them; add --otlp-endpoint");
  }
}

}  // namespace tessera
