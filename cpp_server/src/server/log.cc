#include "server/log.h"

#include <unistd.h>

#include <chrono>
#include <ctime>
#include <nlohmann/json.hpp>

namespace tessera {
namespace {

using Json = nlohmann::ordered_json;

std::string_view level_name(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug: return "debug";
    case LogLevel::kInfo: return "info";
    case LogLevel::kWarning: return "warning";
    case LogLevel::kError: return "error";
  }
  return "unknown";
}

// UTC, ISO 8601 with microseconds.
std::string timestamp() {
  const auto now = std::chrono::system_clock::now();
  const std::time_t whole = std::chrono::system_clock::to_time_t(now);
  const auto micros =
      std::chrono::duration_cast<std::chrono::microseconds>(now.time_since_epoch()).count() %
      1'000'000;
  std::tm parts{};
  gmtime_r(&whole, &parts);
  char text[64];
  const std::size_t length = std::strftime(text, sizeof(text), "%Y-%m-%dT%H:%M:%S", &parts);
  std::snprintf(text + length, sizeof(text) - length, ".%06dZ", static_cast<int>(micros));
  return text;
}

std::string dump(const Json& json) {
  return json.dump(-1, ' ', false, Json::error_handler_t::replace);
}

}  // namespace

void Log::write(LogLevel level, std::string_view event, Fields fields) const {
  if (level < level_) return;
  std::string line;
  if (json_) {
    Json object;
    object["event"] = event;
    for (const auto& [name, value] : fields) {
      std::visit([&, key = std::string(name)](const auto& held) { object[key] = held; }, value);
    }
    object["level"] = level_name(level);
    object["timestamp"] = timestamp();
    line = dump(object);
  } else {
    line = timestamp() + " [" + std::string(level_name(level)) + "] " + std::string(event);
    for (const auto& [name, value] : fields) {
      Json held;
      std::visit([&](const auto& content) { held = content; }, value);
      line += " " + std::string(name) + "=" + dump(held);
    }
  }
  line += '\n';
  // One write, so that lines of two threads do not mix. There is nowhere to report a failure.
  [[maybe_unused]] const ssize_t written = ::write(descriptor_, line.data(), line.size());
}

void Log::debug(std::string_view event, Fields fields) const {
  write(LogLevel::kDebug, event, fields);
}
void Log::info(std::string_view event, Fields fields) const {
  write(LogLevel::kInfo, event, fields);
}
void Log::warning(std::string_view event, Fields fields) const {
  write(LogLevel::kWarning, event, fields);
}
void Log::error(std::string_view event, Fields fields) const {
  write(LogLevel::kError, event, fields);
}

}  // namespace tessera
