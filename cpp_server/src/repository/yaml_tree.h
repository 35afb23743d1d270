// YAML as settings need it: scalars, lists and maps, without anchors, aliases and tags.
//
// Contract: a plain value; free functions without state; any thread. What is not such YAML throws
// UsageError with one line that says where and what, without the file's name.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tessera {

struct YamlTree {
  enum class Kind { kNull, kScalar, kList, kMap };
  Kind kind = Kind::kNull;
  bool quoted = false;          // kScalar: it is text whatever it looks like
  std::string scalar;           // kScalar
  std::vector<YamlTree> items;  // kList
  std::vector<std::pair<std::string, YamlTree>> fields;  // kMap; all keys different
  int line = 1;  // where it begins, from 1; of a map's value, where its key stands

  // In the source file, where the type is complete: Clang asks that of a pair.
  YamlTree();
  YamlTree(const YamlTree& other);
  YamlTree(YamlTree&& other) noexcept;
  YamlTree& operator=(const YamlTree& other);
  YamlTree& operator=(YamlTree&& other) noexcept;
  ~YamlTree();

  // As a message shows it.
  std::string shown() const;
};

// Levels of lists and maps within each other.
inline constexpr std::size_t kMaxYamlDepth = 8;

// The one document in `yaml`, UTF-8. Keys have to be text: those that YAML reads as something else
// (yes, on, null, ...) need quotes.
YamlTree parse_yaml(std::string_view yaml);

}  // namespace tessera
