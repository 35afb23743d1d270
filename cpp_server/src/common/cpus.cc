#include "common/cpus.h"

#include <sched.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

namespace tessera {
namespace {

namespace fs = std::filesystem;

// The whole numbers of a file; none where it is missing or says something else, such as "max".
std::vector<double> numbers(const fs::path& path) {
  std::ifstream file(path);
  std::vector<double> found;
  long long number = 0;
  while (file >> number) found.push_back(static_cast<double>(number));
  return file.eof() ? found : std::vector<double>();
}

std::optional<double> quota_of(const fs::path& group) {
  std::vector<double> quota = numbers(group / "cpu.max");
  if (quota.empty()) {
    quota = numbers(group / "cpu.cfs_quota_us");
    const std::vector<double> period = numbers(group / "cpu.cfs_period_us");
    quota.insert(quota.end(), period.begin(), period.end());
  }
  if (quota.size() != 2 || quota[0] <= 0 || quota[1] <= 0) return std::nullopt;
  return quota[0] / quota[1];
}

// Whether `controllers`, separated by commas, has the one of CPU time; version 2 names none.
bool for_cpus(const std::string& controllers) {
  return controllers.empty() || ("," + controllers + ",").find(",cpu,") != std::string::npos;
}

// The folders of this process's groups, those above them included.
std::vector<fs::path> folders(const fs::path& groups, const fs::path& membership) {
  std::vector<fs::path> found;
  std::ifstream file(membership);
  for (std::string line; std::getline(file, line);) {
    std::istringstream fields(line);
    std::string id;
    std::string controllers;
    std::string path;
    std::getline(fields, id, ':');
    std::getline(fields, controllers, ':');
    std::getline(fields, path);
    if (!for_cpus(controllers)) continue;
    const fs::path root = controllers.empty() ? groups : groups / controllers;
    // In a container the path may be the host's, which is not mounted here.
    fs::path relative = fs::path(path).relative_path();
    for (; !relative.empty(); relative = relative.parent_path()) found.push_back(root / relative);
    found.push_back(root);
  }
  found.push_back(groups);
  found.push_back(groups / "cpu");
  return found;
}

}  // namespace

int cpu_quota(const fs::path& groups, const fs::path& membership) {
  std::optional<double> least;
  for (const fs::path& folder : folders(groups, membership)) {
    const std::optional<double> quota = quota_of(folder);
    if (quota.has_value()) least = std::min(least.value_or(*quota), *quota);
  }
  // Beyond any machine's CPUs the number does not matter.
  return least.has_value() ? static_cast<int>(std::ceil(std::min(*least, 1e6))) : 0;
}

int available_cpus() {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  const bool known = sched_getaffinity(0, sizeof(allowed), &allowed) == 0;
  const int cpus = known ? std::max(1, CPU_COUNT(&allowed)) : 1;
  const int quota = cpu_quota("/sys/fs/cgroup", "/proc/self/cgroup");
  return quota > 0 ? std::min(cpus, quota) : cpus;
}

}  // namespace tessera
