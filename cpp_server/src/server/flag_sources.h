// Where the value of each flag comes from: the command line wins over the environment, that over
// the file of --config. The rules are those of serving/commands/flag_sources.py, whose docstring
// states them; tests/server/flag_cases.json holds both servers to one table of cases.
//
// Contract: one thread; the flags outlive it. What a user has to change throws UsageError, whose
// text is one line that begins with the place: --port, TESSERA_PORT or FILE:3: port.
#pragma once

#include <cstddef>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "common/flags.h"

namespace tessera {

// Names and values of variables.
using Environment = std::vector<std::pair<std::string, std::string>>;

// The variables of this process whose names begin with TESSERA_, in the names' order.
Environment environment_of_process();

inline constexpr std::size_t kMaxFlagFileBytes = std::size_t{1} << 20;

class FlagSources {
 public:
  explicit FlagSources(const std::vector<Flag>& flags) : flags_(flags) {}

  // In this order. add_file reads the file that --config or TESSERA_CONFIG names, if any.
  void add_command_line(const std::vector<GivenFlag>& given);
  void add_environment(const Environment& environment);
  void add_file();

  // Calls `set` of each flag that has values, for each of them.
  void set() const;

  // Throws the error of a value with the place where the value stands.
  [[noreturn]] void rethrow(const FlagError& error) const;

 private:
  struct Given {
    std::vector<std::string> values;
    std::string source;
  };

  const Flag* find(const std::string& name) const;
  void refuse_near(const std::string& variable) const;
  void set_switch(const Flag& flag, const std::string& word) const;

  const std::vector<Flag>& flags_;
  std::map<std::string, Given> given_;  // by the flag's name
};

}  // namespace tessera
