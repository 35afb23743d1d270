// Structured log lines on stderr: one JSON object per line, or text for a terminal.
//
// Who logs puts a finished line into a bounded queue; a thread of the log's own writes it. So a
// pipe that nobody reads, a closed one or a full disk costs lines and nothing else: what does not
// fit into the queue, or cannot be written, is dropped and counted.
//
// Contract: a Log may be used from any thread, never blocks on what it writes to, and throws
// nothing once it is made. A line of up to 4 KiB is never torn, also where several processes write
// to one pipe. Fields are escaped; bytes that are not UTF-8 are replaced. SIGPIPE must be ignored
// (signals.h does that).
#pragma once

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "server/config.h"

namespace tessera {

class LogWriter;

class Log {
 public:
  using Value = std::variant<std::string, std::int64_t, double, std::vector<std::string>>;
  using Fields = std::initializer_list<std::pair<std::string_view, Value>>;

  // Writes to file descriptor `descriptor`, which is not closed. Starts the writing thread.
  Log(LogLevel level, bool json, int descriptor = 2);
  // Waits as flush does, then leaves the writing thread alone if it still waits for its reader.
  ~Log();
  Log(const Log&) = delete;
  Log& operator=(const Log&) = delete;

  bool debugs() const { return level_ == LogLevel::kDebug; }

  void debug(std::string_view event, Fields fields = {}) const;
  void info(std::string_view event, Fields fields = {}) const;
  void warning(std::string_view event, Fields fields = {}) const;
  void error(std::string_view event, Fields fields = {}) const;

  // A warning that clients can cause as often as they like: ten a second of each event, then one
  // line "suppressed" that says of which event how many more there were. `event` is one of a fixed
  // set of names, never a text that a client has sent.
  void client_warning(std::string_view event, Fields fields = {}) const;

  // Waits until what is queued has been written, for a second at most. To be called before
  // the process ends by another way than this object's destructor.
  void flush() const;

  // Lines that did not fit into the queue or could not be written.
  std::uint64_t dropped_lines() const;

 private:
  void write(LogLevel level, std::string_view event, Fields fields) const;

  LogLevel level_;
  bool json_;
  // Shared with the writing thread, which may outlive this object.
  std::shared_ptr<LogWriter> writer_;
};

}  // namespace tessera
