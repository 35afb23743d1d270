#include "server/connection_flags.h"

#include <cstdint>
#include <string>

#include "common/text.h"

namespace tessera {
namespace {

// A whole number of seconds; `target` holds the default.
Flag seconds_flag(const std::string& name, const std::string& help, Duration& target) {
  constexpr std::int64_t kMost = 1'000'000;
  const auto whole = std::chrono::duration_cast<std::chrono::seconds>(target).count();
  return {name, "S", text(help, ", seconds (default: ", whole, ")"),
          [name, &target](const std::string& value) {
            target = std::chrono::seconds(checked_number<std::int64_t>(name, value, 1, kMost));
          }};
}

}  // namespace

std::vector<Flag> connection_flags(http2::Limits& limits) {
  constexpr int kMost = 1'000'000;
  return {
      number_flag("max-connections",
                  "connections of the gRPC port at a time, and no more than there are descriptors "
                  "for (ulimit -n, less 64); further ones wait",
                  limits.max_connections, 1, kMost),
      number_flag("max-connection-streams", "calls of a connection at a time",
                  limits.max_connection_streams, 1, kMost),
      number_flag("max-streams",
                  text("calls of all connections at a time; each connection may always have ",
                       http2::kOwnStreams),
                  limits.max_streams, 1, kMost),
      number_flag("max-header-bytes",
                  "names and values of a call's headers, bytes, with 32 for each; a connection "
                  "that sends more is closed",
                  limits.max_header_bytes, 1'024, 16'384),
      number_flag(
          "max-control-frames-per-s",
          text("frames of a connection that belong to no call's messages (SETTINGS, "
               "WINDOW_UPDATE, ..., but PING), each second, ",
               http2::kFramesPerAnswer, " more for each answer, and those of ",
               http2::kBurstSeconds, " seconds at once; a connection that sends more is closed"),
          limits.max_control_frames_per_s, 1, kMost),
      number_flag("max-pings-per-s",
                  text("PING frames of a connection, as --max-control-frames-per-s counts others"),
                  limits.max_pings_per_s, 1, kMost),
      number_flag(
          "max-resets-per-s",
          text("calls that a connection may end before they are answered, each second, and "
               "those of ",
               http2::kBurstSeconds, " seconds at once; a connection that ends more is closed"),
          limits.max_resets_per_s, 1, kMost),
      seconds_flag("handshake-timeout-s",
                   "from a connection to its first SETTINGS, and for each call's headers",
                   limits.handshake_timeout),
      seconds_flag("message-timeout-s",
                   "from a call's headers until its message is whole, and a second more for every "
                   "64 KiB of it",
                   limits.message_timeout),
      seconds_flag("write-timeout-s",
                   "until an answer has been read, and a second more for every 64 KiB of it; while "
                   "the server is full, this and --message-timeout-s are 2 seconds",
                   limits.write_timeout),
      seconds_flag(
          "idle-timeout-s",
          "a connection without a call; while as many connections as may be are open, this "
          "and --handshake-timeout-s are 2 seconds",
          limits.idle_timeout),
      {"max-connection-age-s", "N",
       "how old a connection may become, a tenth more or less, seconds; then its client is asked "
       "to "
       "connect anew, by which it finds servers that were added, and no call is lost; 0: any age "
       "(default: 0)",
       [&limits](const std::string& value) {
         limits.max_age = std::chrono::seconds(
             checked_number<std::int64_t>("max-connection-age-s", value, 0, kMost));
       }},
  };
}

}  // namespace tessera
