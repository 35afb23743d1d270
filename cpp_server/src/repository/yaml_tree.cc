#include "repository/yaml_tree.h"

#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/exceptions.h>
#include <yaml-cpp/parser.h>

#include <algorithm>
#include <optional>
#include <sstream>

#include "common/flags.h"
#include "common/text.h"
#include "request/utf8.h"

namespace tessera {

YamlTree::YamlTree() = default;
YamlTree::YamlTree(const YamlTree& other) = default;
YamlTree::YamlTree(YamlTree&& other) noexcept = default;
YamlTree& YamlTree::operator=(const YamlTree& other) = default;
YamlTree& YamlTree::operator=(YamlTree&& other) noexcept = default;
YamlTree::~YamlTree() = default;

namespace {

using Kind = YamlTree::Kind;

[[noreturn]] void refuse(const YAML::Mark& mark, const std::string& what) {
  throw UsageError(
      text("not valid here (line ", mark.line + 1, ", column ", mark.column + 1, "): ", what));
}

bool is_null(std::string_view plain) {
  return plain.empty() || plain == "~" || plain == "null" || plain == "Null" || plain == "NULL";
}

// Words that YAML 1.1 reads as true or false.
bool is_boolean(std::string plain) {
  std::transform(plain.begin(), plain.end(), plain.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  for (const char* word : {"yes", "no", "true", "false", "on", "off"}) {
    if (plain == word) return true;
  }
  return false;
}

// Builds the tree of the parser's events.
class Builder final : public YAML::EventHandler {
 public:
  YamlTree take() && { return std::move(root_); }

  void OnDocumentStart(const YAML::Mark& /*mark*/) override {}
  void OnDocumentEnd() override {}

  void OnNull(const YAML::Mark& mark, YAML::anchor_t anchor) override {
    check(mark, "", anchor);
    add(mark, {});
  }

  void OnAlias(const YAML::Mark& mark, YAML::anchor_t /*anchor*/) override {
    refuse(mark, "an alias is not allowed; write the value itself");
  }

  void OnScalar(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                const std::string& value) override {
    check(mark, tag, anchor);
    const bool quoted = tag == "!";
    YamlTree scalar;
    if (quoted || !is_null(value)) {
      scalar.kind = Kind::kScalar;
      scalar.quoted = quoted;
      scalar.scalar = value;
    }
    add(mark, std::move(scalar));
  }

  void OnSequenceStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                       YAML::EmitterStyle::value /*style*/) override {
    check(mark, tag, anchor);
    open(mark, Kind::kList);
  }
  void OnSequenceEnd() override { open_.pop_back(); }

  void OnMapStart(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor,
                  YAML::EmitterStyle::value /*style*/) override {
    check(mark, tag, anchor);
    open(mark, Kind::kMap);
  }
  void OnMapEnd() override { open_.pop_back(); }

 private:
  // A list or map whose end has not come, by where it lies below the root: items may move.
  struct Open {
    Kind kind;
    std::vector<std::size_t> path;
    std::optional<std::string> key;  // of a map: whose value comes next
    int key_line = 0;
  };

  static void check(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t anchor) {
    if (anchor != YAML::NullAnchor) refuse(mark, "an anchor is not allowed; write the value alone");
    if (!tag.empty() && tag != "!" && tag != "?") {
      refuse(mark, "a tag is not allowed; write the value alone");
    }
  }

  YamlTree& at(const std::vector<std::size_t>& path) {
    YamlTree* tree = &root_;
    for (const std::size_t index : path) {
      tree = tree->kind == Kind::kMap ? &tree->fields[index].second : &tree->items[index];
    }
    return *tree;
  }

  // Puts `tree` where the parser is; the path to it, nothing where it was a key.
  std::optional<std::vector<std::size_t>> add(const YAML::Mark& mark, YamlTree tree) {
    tree.line = mark.line + 1;
    if (open_.empty()) {
      root_ = std::move(tree);
      return std::vector<std::size_t>{};
    }
    Open& parent = open_.back();
    YamlTree& into = at(parent.path);
    std::vector<std::size_t> path = parent.path;
    if (parent.kind == Kind::kList) {
      path.push_back(into.items.size());
      into.items.push_back(std::move(tree));
      return path;
    }
    if (!parent.key) {
      parent.key = key_of(mark, tree);
      parent.key_line = tree.line;
      return std::nullopt;
    }
    const auto same = [&](const auto& field) { return field.first == *parent.key; };
    if (std::any_of(into.fields.begin(), into.fields.end(), same)) {
      throw UsageError(
          text(*parent.key, " is given twice (line ", mark.line + 1, "); keep one of the two"));
    }
    path.push_back(into.fields.size());
    tree.line = parent.key_line;
    into.fields.emplace_back(std::move(*parent.key), std::move(tree));
    parent.key.reset();
    return path;
  }

  static std::string key_of(const YAML::Mark& mark, const YamlTree& tree) {
    if (tree.kind != Kind::kScalar) refuse(mark, "a key has to be text");
    if (!tree.quoted && is_boolean(tree.scalar)) {
      refuse(mark, "the key " + tree.scalar + " means true or false in YAML; put it in quotes");
    }
    return tree.scalar;
  }

  void open(const YAML::Mark& mark, Kind kind) {
    if (open_.size() == kMaxYamlDepth) {
      refuse(mark, text("more than ", kMaxYamlDepth, " levels of lists and maps"));
    }
    if (!open_.empty() && open_.back().kind == Kind::kMap && !open_.back().key) {
      refuse(mark, "a key has to be text");
    }
    YamlTree tree;
    tree.kind = kind;
    open_.push_back({kind, *add(mark, std::move(tree)), std::nullopt, 0});
  }

  YamlTree root_;
  std::vector<Open> open_;
};

}  // namespace

std::string YamlTree::shown() const {
  switch (kind) {
    case Kind::kNull: return "empty";
    case Kind::kList: return "a list";
    case Kind::kMap: return "a mapping";
    case Kind::kScalar: break;
  }
  constexpr std::size_t kMost = 80;
  std::string begin = scalar.substr(0, kMost);
  std::replace_if(
      begin.begin(), begin.end(), [](char c) { return c < ' ' || c > '~'; }, '?');
  if (scalar.size() > kMost) begin += "...";
  const bool number =
      !quoted && !begin.empty() && begin.find_first_not_of("0123456789+-.") == std::string::npos;
  return number ? begin : "'" + begin + "'";
}

YamlTree parse_yaml(std::string_view yaml) {
  if (!is_utf8(yaml)) throw UsageError("not UTF-8 text; save it as such");
  std::istringstream stream{std::string(yaml)};
  Builder builder;
  try {
    YAML::Parser parser(stream);
    parser.HandleNextDocument(builder);
    Builder second;
    if (parser.HandleNextDocument(second))
      throw UsageError("has more than one YAML document; keep one");
  } catch (const YAML::Exception& error) {
    throw UsageError(text("not valid YAML: line ", error.mark.line + 1, ", column ",
                          error.mark.column + 1, ": ", error.msg));
  }
  return std::move(builder).take();
}

}  // namespace tessera
