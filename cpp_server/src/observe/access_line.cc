#include <time.h>

#include <array>
#include <string_view>

#include "observe/access_log.h"
#include "observe/json_text.h"

namespace tessera {
namespace {

constexpr std::size_t kUsualBytes = 512;
constexpr int kMicrosPerMilli = 1'000;

// Below 1,000, as three digits.
void append_thousandths(std::string& line, std::int64_t number) {
  constexpr std::int64_t kTen = 10;
  line += '.';
  for (const std::int64_t unit : {kTen * kTen, kTen, std::int64_t{1}}) {
    line += static_cast<char>('0' + number / unit % kTen);
  }
}

void append_ms(std::string& line, std::int64_t micros) {
  append_number(line, micros / kMicrosPerMilli);
  append_thousandths(line, micros % kMicrosPerMilli);
}

// RFC 3339, in UTC, with milliseconds.
void append_time(std::string& line, std::chrono::system_clock::time_point now) {
  // The text of a second is made once by each thread.
  struct Second {
    std::time_t number = -1;
    std::array<char, 20> text{};
  };
  static thread_local Second second;
  const auto whole = std::chrono::floor<std::chrono::seconds>(now);
  const std::time_t number = std::chrono::system_clock::to_time_t(whole);
  if (number != second.number) {
    std::tm parts{};
    ::gmtime_r(&number, &parts);
    std::strftime(second.text.data(), second.text.size(), "%Y-%m-%dT%H:%M:%S", &parts);
    second.number = number;
  }
  line += second.text.data();
  append_thousandths(line, std::chrono::floor<std::chrono::milliseconds>(now - whole).count());
  line += 'Z';
}

}  // namespace

std::string access_line(const CallRecord& record, std::chrono::system_clock::time_point now) {
  std::string line;
  line.reserve(kUsualBytes);
  const auto named = [&](std::string_view start, std::string_view value) {
    line += start;
    append_json_text(line, value);
  };
  line += R"({"time":")";
  append_time(line, now);
  named(R"(","protocol":)", record.protocol);
  named(R"(,"method":)", record.method);
  named(R"(,"peer":)", record.peer);
  named(R"(,"model":)", record.model);
  named(R"(,"version":)", record.version);
  line += R"(,"samples":)";
  append_number(line, record.samples);
  line += R"(,"ids":)";
  append_number(line, record.ids);
  named(R"(,"code":)", code_name(record.code));
  if (record.http_status != 0) {
    line += R"(,"http_status":)";
    append_number(line, record.http_status);
  }
  line += R"(,"duration_ms":)";
  append_ms(line, std::chrono::duration_cast<std::chrono::microseconds>(record.took).count());
  if (record.timings.has_value()) {
    line += R"(,"queue_ms":)";
    append_ms(line, record.timings->queue_us);
    line += R"(,"forward_ms":)";
    append_ms(line, record.timings->forward_us);
  }
  named(R"(,"request_id":)", record.request_id);
  if (!record.trace_id.empty()) named(R"(,"trace_id":)", record.trace_id);
  line += "}\n";
  return line;
}

}  // namespace tessera
