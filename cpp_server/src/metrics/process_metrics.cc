#include "metrics/process_metrics.h"

#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>

namespace tessera {
namespace {

std::string read_file(const char* path) {
  std::ifstream stream(path);
  return {std::istreambuf_iterator<char>(stream), std::istreambuf_iterator<char>()};
}

// Seconds since the epoch when the machine started; 0 when unknown.
double boot_time() {
  std::istringstream lines(read_file("/proc/stat"));
  for (std::string word; lines >> word;) {
    double value = 0;
    if (word == "btime" && lines >> value) return value;
  }
  return 0;
}

double open_descriptors() {
  std::error_code failed;
  const std::filesystem::directory_iterator entries("/proc/self/fd", failed);
  if (failed) return 0;
  return static_cast<double>(std::distance(begin(entries), end(entries)));
}

}  // namespace

std::vector<ProcessMetric> process_metrics() {
  std::vector<ProcessMetric> metrics;
  const std::string stat = read_file("/proc/self/stat");
  // The name in parentheses may hold spaces; what follows it does not.
  const auto name_end = stat.rfind(')');
  if (name_end != std::string::npos) {
    std::istringstream words(stat.substr(name_end + 1));
    const std::vector<std::string> fields((std::istream_iterator<std::string>(words)), {});
    // proc(5) counts from 1; the first word here is its field 3.
    const auto field = [&](std::size_t number) { return std::stod(fields.at(number - 3)); };
    const auto ticks = static_cast<double>(sysconf(_SC_CLK_TCK));
    const auto page = static_cast<double>(sysconf(_SC_PAGESIZE));
    metrics.push_back(
        {"process_virtual_memory_bytes", "Virtual memory size in bytes.", false, field(23)});
    metrics.push_back({"process_resident_memory_bytes", "Resident memory size in bytes.", false,
                       field(24) * page});
    metrics.push_back({"process_start_time_seconds",
                       "Start time of the process since unix epoch in seconds.", false,
                       boot_time() + field(22) / ticks});
  }
  // To the nanosecond, where /proc counts hundredths: calibration reads it before and after a tenth
  // of a second.
  timespec used{};
  if (clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used) == 0) {
    metrics.push_back({"process_cpu_seconds_total",
                       "Total user and system CPU time spent in seconds.", true,
                       static_cast<double>(used.tv_sec) + static_cast<double>(used.tv_nsec) / 1e9});
  }
  metrics.push_back(
      {"process_open_fds", "Number of open file descriptors.", false, open_descriptors()});
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) == 0) {
    metrics.push_back({"process_max_fds", "Maximum number of open file descriptors.", false,
                       static_cast<double>(limit.rlim_cur)});
  }
  return metrics;
}

}  // namespace tessera
