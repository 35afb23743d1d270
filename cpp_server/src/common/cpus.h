// How many CPUs this process may use, quotas of control groups counted: a container often has a
// share of a machine's time by a quota while all of the machine's CPUs are in its affinity mask.
// Linux' Documentation/admin-guide/cgroup-v2.rst describes cpu.max.
//
// Contract: free functions without state; files that are missing or not understood count as no
// quota.
#pragma once

#include <filesystem>

namespace tessera {

// The CPUs of the affinity mask, or the least quota of this process's control groups and those
// above them, rounded up, if that is less. At least 1. The rules are those of tessera/cpus.py.
int available_cpus();

// The least quota in CPUs, rounded up; 0 without one. `groups` is where control groups are mounted,
// `membership` the file that says of which this process is a member.
int cpu_quota(const std::filesystem::path& groups, const std::filesystem::path& membership);

}  // namespace tessera
