// Structured log lines on stderr: one JSON object per line, or text for a terminal.
//
// Contract: a Log may be used from any thread; a line is one write and never torn. It may
// block on stderr, so nothing that is not debug is logged per request. Fields are escaped;
// bytes that are not UTF-8 are replaced.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "server/config.h"

namespace tessera {

class Log {
 public:
  using Value = std::variant<std::string, std::int64_t, double, std::vector<std::string>>;
  using Fields = std::initializer_list<std::pair<std::string_view, Value>>;

  // Writes to file descriptor `descriptor`, which is not closed.
  Log(LogLevel level, bool json, int descriptor = 2)
      : level_(level), json_(json), descriptor_(descriptor) {}

  bool debugs() const { return level_ == LogLevel::kDebug; }

  void debug(std::string_view event, Fields fields = {}) const;
  void info(std::string_view event, Fields fields = {}) const;
  void warning(std::string_view event, Fields fields = {}) const;
  void error(std::string_view event, Fields fields = {}) const;

 private:
  void write(LogLevel level, std::string_view event, Fields fields) const;

  LogLevel level_;
  bool json_;
  int descriptor_;
};

}  // namespace tessera
