// tests/server/flag_cases.json: flags from the command line, the environment and a file, case by
// case.
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "common/text.h"
#include "server/config.h"

namespace tessera {
namespace {

using Json = nlohmann::json;

class FlagCases : public testing::Test {
 protected:
  void TearDown() override { std::filesystem::remove(path_); }

  void write(const std::string& content) {
    std::ofstream file(path_, std::ios::binary | std::ios::trunc);
    file << content;
  }

  const std::string path_ =
      (std::filesystem::temp_directory_path() / text("tessera-flags-", ::getpid(), ".yaml"))
          .string();
};

std::string with_path(std::string message, const std::string& path) {
  const auto at = message.find("FILE");
  return at == std::string::npos ? message : message.replace(at, 4, path);
}

std::string error_of(const std::vector<std::string>& arguments, const Environment& environment) {
  try {
    parse_flags(arguments, environment);
  } catch (const UsageError& error) {
    return error.what();
  }
  return "";
}

TEST_F(FlagCases, AreThoseOfBothServers) {
  std::ifstream file(TESSERA_FLAG_CASES);
  for (const Json& one : Json::parse(file)) {
    const auto name = one.at("case").get<std::string>();
    auto arguments = one.at("arguments").get<std::vector<std::string>>();
    if (!one.at("file").is_null()) {
      write(one.at("file").get<std::string>());
      arguments.insert(arguments.end(), {"--config", path_});
    }
    Environment environment;
    for (const auto& [variable, value] : one.at("variables").items()) {
      environment.emplace_back(variable, value.get<std::string>());
    }
    if (one.contains("error")) {
      EXPECT_EQ(error_of(arguments, environment),
                with_path(one.at("error").get<std::string>(), path_))
          << name;
      continue;
    }
    ASSERT_EQ(error_of(arguments, environment), "") << name;
    Json models = Json::array();
    for (const ModelSource& model : parse_flags(arguments, environment).models) {
      models.push_back({model.path, model.name});
    }
    EXPECT_EQ(models, one.at("models")) << name;
  }
}

TEST_F(FlagCases, AFileThatCannotBeRead) {
  const auto refusal = [&](const std::string& content) {
    write(content);
    return error_of({"--config", path_}, {});
  };
  EXPECT_TRUE(refusal("port: [").starts_with(path_ + ": not valid YAML: line "));
  EXPECT_EQ(refusal("port: \xff"), path_ + ": not UTF-8 text; save it as such");
  EXPECT_TRUE(refusal("port: &x 1\nhttp-port: *x").starts_with(path_ + ": not valid here (line 1"));
  EXPECT_EQ(refusal("# " + std::string(kMaxFlagFileBytes, 'x')),
            path_ + ": has more than 1048576 bytes, the limit; make it shorter");
}

}  // namespace
}  // namespace tessera
