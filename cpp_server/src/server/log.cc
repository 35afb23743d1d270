#include "server/log.h"

#include <chrono>
#include <ctime>
#include <exception>
#include <nlohmann/json.hpp>
#include <thread>

#include "common/thread_name.h"
#include "server/log_writer.h"

namespace tessera {
namespace {

using Json = nlohmann::ordered_json;

// What a process that ends waits for its log: a reader that is there takes far less.
constexpr Duration kFlushLimit = std::chrono::seconds(1);

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

// With its newline.
std::string rendered(bool as_json, LogLevel level, std::string_view event, Log::Fields fields) {
  std::string line;
  if (as_json) {
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
  return line;
}

}  // namespace

Log::Log(LogLevel level, bool json, int descriptor) : level_(level), json_(json) {
  writer_ =
      std::make_shared<LogWriter>(descriptor, [json](std::string_view kind, std::uint64_t lines) {
        return rendered(
            json, LogLevel::kWarning, "suppressed",
            {{"suppressed", std::string(kind)}, {"lines", static_cast<std::int64_t>(lines)}});
      });
  // Not joined: it may wait for its reader for ever.
  std::thread([writer = writer_] {
    name_thread("log");
    writer->run();
  }).detach();
}

Log::~Log() {
  flush();
  writer_->close();
}

void Log::write(LogLevel level, std::string_view event, Fields fields) const {
  if (level < level_) return;
  try {
    writer_->put(rendered(json_, level, event, fields));
  } catch (const std::exception&) {  // no memory for the line
    writer_->drop_line();
  }
}

void Log::flush() const { writer_->flush(kFlushLimit); }

std::uint64_t Log::dropped_lines() const { return writer_->dropped_lines(); }

void Log::client_warning(std::string_view event, Fields fields) const {
  if (LogLevel::kWarning < level_ || !writer_->passes(event)) return;
  write(LogLevel::kWarning, event, fields);
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
