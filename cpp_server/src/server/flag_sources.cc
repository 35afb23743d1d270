#include "server/flag_sources.h"

#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <optional>
#include <string_view>

#include "common/nearest.h"
#include "common/text.h"
#include "repository/small_file.h"
#include "repository/yaml_tree.h"

namespace tessera {
namespace {

constexpr std::string_view kPrefix = "TESSERA_";
constexpr std::size_t kNearEdits = 2;

std::string variable_of(const std::string& name) {
  std::string variable(kPrefix);
  for (const char c : name) {
    variable += c == '-' ? '_' : static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  }
  return variable;
}

// The parts between commas; "a,," has two that are empty.
std::vector<std::string> parts_of(const std::string& value) {
  std::vector<std::string> parts(1);
  for (const char c : value) {
    if (c == ',') {
      parts.emplace_back();
    } else {
      parts.back() += c;
    }
  }
  return parts;
}

std::string word_of(const std::string& source, const YamlTree& tree) {
  if (tree.kind == YamlTree::Kind::kScalar) return tree.scalar;
  throw UsageError(text(source, " is ", tree.shown(), "; give one value, or leave it out"));
}

std::vector<std::string> words_of(const Flag& flag, const std::string& source,
                                  const YamlTree& tree) {
  if (tree.kind != YamlTree::Kind::kList || !flag.repeatable) return {word_of(source, tree)};
  std::vector<std::string> words;
  words.reserve(tree.items.size());
  for (const YamlTree& item : tree.items) words.push_back(word_of(source, item));
  return words;
}

YamlTree read_file(const std::string& path) {
  const std::optional<std::string> yaml = read_small_file(path, kMaxFlagFileBytes);
  if (!yaml) refuse_flag("config", "'" + path + "'", "there is no such file");
  try {
    YamlTree tree = parse_yaml(*yaml);
    if (tree.kind != YamlTree::Kind::kMap && tree.kind != YamlTree::Kind::kNull) {
      throw UsageError("expected keys such as 'port: 50051' at the top of the file");
    }
    return tree;
  } catch (const UsageError& error) {
    throw UsageError(text(path, ": ", error.what()));
  }
}

// Whether `value` is what Kubernetes puts into the variables of a Service.
bool is_of_kubernetes(std::string_view value) {
  return value.starts_with("tcp://") || value.starts_with("udp://") || value.starts_with("sctp://");
}

}  // namespace

Environment environment_of_process() {
  Environment found;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view variable(*entry);
    const std::size_t equals = variable.find('=');
    if (equals == std::string_view::npos || !variable.starts_with(kPrefix)) continue;
    found.emplace_back(variable.substr(0, equals), variable.substr(equals + 1));
  }
  std::sort(found.begin(), found.end());
  return found;
}

const Flag* FlagSources::find(const std::string& name) const {
  const auto flag = std::find_if(flags_.begin(), flags_.end(),
                                 [&](const Flag& candidate) { return candidate.name == name; });
  return flag == flags_.end() ? nullptr : &*flag;
}

void FlagSources::add_command_line(const std::vector<GivenFlag>& given) {
  for (const GivenFlag& one : given) {
    Given& into = given_[one.flag->name];
    into.source = "--" + one.flag->name;
    into.values.push_back(one.flag->metavar.empty() ? "true" : one.value);
  }
}

void FlagSources::add_environment(const Environment& environment) {
  for (const auto& entry : environment) {
    const std::string& variable = entry.first;
    const std::string& value = entry.second;
    if (value.empty() || is_of_kubernetes(value)) continue;
    const auto flag = std::find_if(flags_.begin(), flags_.end(), [&](const Flag& candidate) {
      return variable_of(candidate.name) == variable;
    });
    if (flag == flags_.end()) {
      refuse_near(variable);
      continue;
    }
    if (!flag->in_environment) continue;
    std::vector<std::string> values =
        flag->repeatable ? parts_of(value) : std::vector<std::string>{value};
    if (std::any_of(values.begin(), values.end(), [](const auto& part) { return part.empty(); })) {
      throw UsageError(
          text(variable, " is '", value, "'; give values with one comma between them"));
    }
    given_.try_emplace(flag->name, Given{.values = std::move(values), .source = variable});
  }
}

void FlagSources::refuse_near(const std::string& variable) const {
  const std::string bare = variable.substr(kPrefix.size());
  std::vector<std::string> known;
  for (const Flag& flag : flags_) {
    if (flag.in_environment) known.push_back(variable_of(flag.name).substr(kPrefix.size()));
  }
  const std::string near = nearest(bare, known);
  if (near.empty() || edits(bare, near) > kNearEdits) return;
  throw UsageError(text(variable, " is the variable of no flag; did you mean ", kPrefix, near,
                        "? Unset it otherwise"));
}

void FlagSources::add_file() {
  const auto config = given_.find("config");
  if (config == given_.end()) return;
  const std::string path = config->second.values.back();
  std::optional<YamlTree> tree;
  try {
    tree = read_file(path);
  } catch (const FlagError& error) {
    rethrow(error);
  }
  for (const auto& [key, value] : tree->fields) {
    const std::string place = text(path, ":", value.line);
    const Flag* const flag = find(key);
    if (flag == nullptr || !flag->in_file) {
      std::vector<std::string> known;
      for (const Flag& candidate : flags_) {
        if (candidate.in_file) known.push_back("--" + candidate.name);
      }
      const std::string near = nearest("--" + key, known);
      throw UsageError(
          text(place, ": '", key, "' is not a flag's name; ",
               near.empty() ? "see --help" : text("did you mean ", near.substr(2), "?")));
    }
    const std::string source = text(place, ": ", key);
    given_.try_emplace(key, Given{.values = words_of(*flag, source, value), .source = source});
  }
}

void FlagSources::set() const {
  for (const Flag& flag : flags_) {
    const auto given = given_.find(flag.name);
    if (given == given_.end()) continue;
    try {
      for (const std::string& value : given->second.values) {
        if (flag.metavar.empty()) {
          set_switch(flag, value);
        } else {
          flag.set(value);
        }
      }
    } catch (const FlagError& error) {
      rethrow(error);
    }
  }
}

void FlagSources::set_switch(const Flag& flag, const std::string& word) const {
  if (word == "true" || word == "1") {
    flag.set("");
  } else if (word != "false" && word != "0") {
    refuse_flag(flag.name, "'" + word + "'", "give true or false");
  }
}

void FlagSources::rethrow(const FlagError& error) const {
  const auto given = given_.find(error.name());
  const std::string source = given == given_.end() ? "--" + error.name() : given->second.source;
  throw UsageError(text(source, " is ", error.value(), "; ", error.remedy()));
}

}  // namespace tessera
