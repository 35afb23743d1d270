// CPUs by quotas of made-up control groups.
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "common/cpus.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

class CpuQuota : public testing::Test {
 protected:
  CpuQuota() { fs::create_directories(folder_); }
  ~CpuQuota() override { fs::remove_all(folder_); }

  void file(const std::string& path, const std::string& text) const {
    fs::create_directories((folder_ / path).parent_path());
    std::ofstream(folder_ / path) << text;
  }

  int quota() const { return cpu_quota(folder_ / "groups", folder_ / "member"); }

 private:
  const fs::path folder_ = fs::temp_directory_path() / ("cpus_test." + std::to_string(::getpid()));
};

TEST_F(CpuQuota, IsRoundedUp) {
  file("member", "0::/\n");
  const std::vector<std::pair<std::string, int>> cases = {{"max 100000\n", 0},
                                                          {"200000 100000\n", 2},
                                                          {"150000 100000\n", 2},
                                                          {"5000 100000\n", 1},
                                                          {"0 100000\n", 0},
                                                          {"junk\n", 0},
                                                          {"", 0},
                                                          {"100000\n", 0}};
  for (const auto& [text, cpus] : cases) {
    file("groups/cpu.max", text);
    EXPECT_EQ(quota(), cpus) << text;
  }
}

TEST_F(CpuQuota, TheLeastOfAllGroupsAboveCounts) {
  file("member", "0::/pods/one/container\n");
  file("groups/pods/cpu.max", "300000 100000");
  file("groups/pods/one/cpu.max", "max 100000");
  file("groups/pods/one/container/cpu.max", "400000 100000");
  file("groups/others/cpu.max", "100000 100000");
  EXPECT_EQ(quota(), 3);
}

TEST_F(CpuQuota, OfAContainerThatSeesItsOwnGroupAsTheRoot) {
  file("member", "0::/docker/0123\n");
  file("groups/cpu.max", "200000 100000");
  EXPECT_EQ(quota(), 2);
}

TEST_F(CpuQuota, OfVersion1) {
  file("member", "4:memory:/box\n3:cpu,cpuacct:/box\n1:name=systemd:/box\n");
  file("groups/cpu,cpuacct/box/cpu.cfs_quota_us", "250000\n");
  file("groups/cpu,cpuacct/box/cpu.cfs_period_us", "100000\n");
  file("groups/memory/box/cpu.max", "100000 100000");
  EXPECT_EQ(quota(), 3);
  file("groups/cpu,cpuacct/box/cpu.cfs_quota_us", "-1\n");
  EXPECT_EQ(quota(), 0);
}

TEST_F(CpuQuota, IsNoneWithoutControlGroups) { EXPECT_EQ(quota(), 0); }

TEST(AvailableCpus, AreAtLeastOne) { EXPECT_GE(available_cpus(), 1); }

}  // namespace
}  // namespace tessera
