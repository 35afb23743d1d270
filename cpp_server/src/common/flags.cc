#include "common/flags.h"

#include <utility>

#include "common/nearest.h"

namespace tessera {

FlagError::FlagError(std::string name, std::string value, std::string remedy)
    : UsageError(text("--", name, " is ", value, "; ", remedy)),
      name_(std::move(name)),
      value_(std::move(value)),
      remedy_(std::move(remedy)) {}

void refuse_flag(const std::string& name, const std::string& value, const std::string& remedy) {
  throw FlagError(name, value, remedy);
}

std::vector<GivenFlag> split_flags(const std::vector<Flag>& flags,
                                   const std::vector<std::string>& arguments) {
  std::vector<GivenFlag> given;
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    const std::string& argument = arguments[i];
    const auto equals = argument.find('=');
    const std::string name = argument == "-h" ? "--help" : argument.substr(0, equals);
    const auto flag = std::find_if(flags.begin(), flags.end(), [&](const Flag& candidate) {
      return "--" + candidate.name == name;
    });
    if (flag == flags.end()) {
      std::vector<std::string> names;
      names.reserve(flags.size());
      for (const Flag& candidate : flags) names.push_back("--" + candidate.name);
      const std::string near = nearest(name, names);
      throw UsageError(text("unrecognized argument '", argument, "'; ",
                            near.empty() ? "see --help" : text("did you mean ", near, "?")));
    }
    const bool attached = equals != std::string::npos;
    if (flag->metavar.empty()) {
      if (attached) throw UsageError(text(name, " takes no value"));
      given.push_back({&*flag, ""});
      continue;
    }
    if (!attached && i + 1 == arguments.size()) throw UsageError(text(name, " needs a value"));
    given.push_back({&*flag, attached ? argument.substr(equals + 1) : arguments[++i]});
  }
  return given;
}

void set_flags(const std::vector<Flag>& flags, const std::vector<std::string>& arguments) {
  for (const GivenFlag& given : split_flags(flags, arguments)) given.flag->set(given.value);
}

std::string flags_text(const std::vector<Flag>& flags) {
  std::string out;
  for (const Flag& flag : flags) {
    out += "  --" + flag.name + (flag.metavar.empty() ? "" : " " + flag.metavar) + "\n      " +
           flag.help + "\n";
  }
  return out;
}

}  // namespace tessera
