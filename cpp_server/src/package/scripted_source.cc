#include "package/scripted_source.h"

#include <algorithm>
#include <stdexcept>
#include <string_view>
#include <vector>

#include "common/text.h"
#include "package/format_rules.h"

namespace tessera {
namespace {

constexpr std::string_view kForbidden = "#\\;@`'";
constexpr std::string_view kState = "(state)[";
constexpr std::string_view kSetStateHeader = "def __setstate__(";

// One statement: its first line's number and indent, without spaces around it and without the
// content of its texts.
struct Line {
  std::size_t number = 0;
  std::size_t indent = 0;
  std::string text;
};

[[noreturn]] void refuse(std::size_t number, std::string_view why) {
  throw std::invalid_argument(text("line ", number, " ", why));
}

bool is_word(char c) {
  return c == '_' || (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
}

bool is_dotted(std::string_view part) {
  return !part.empty() &&
         std::all_of(part.begin(), part.end(), [](char c) { return is_word(c) || c == '.'; });
}

// Whether `part` consists of letters of words and of `more`.
bool consists_of(std::string_view part, std::string_view more) {
  return std::all_of(part.begin(), part.end(),
                     [&](char c) { return is_word(c) || more.find(c) != std::string_view::npos; });
}

// `part` with "" for every literal text.
std::string without_texts(std::size_t number, std::string_view part) {
  std::string kept;
  for (std::size_t at = 0; at < part.size();) {
    const char letter = part[at++];
    if (kForbidden.find(letter) != std::string_view::npos) {
      refuse(number, text("has '", letter, "' where torch writes none"));
    }
    if (letter == '"' && !kept.empty() && (is_word(kept.back()) || kept.back() == '"')) {
      refuse(number, "has a text where torch writes none");
    }
    kept += letter;
    if (letter != '"') continue;
    while (at < part.size() && part[at] != '"') at += part[at] == '\\' ? 2 : 1;
    if (at >= part.size()) refuse(number, "has a text that does not end");
    kept += '"';
    ++at;
  }
  return kept;
}

std::string_view stripped(std::string_view part) {
  const auto begin = std::min(part.find_first_not_of(' '), part.size());
  part.remove_prefix(begin);
  return part.substr(0, part.find_last_not_of(' ') + 1);
}

// The statements; brackets join lines.
std::vector<Line> read_lines(std::string_view content) {
  std::vector<Line> lines;
  Line line;
  std::ptrdiff_t depth = 0;
  for (std::size_t number = 1, at = 0; at <= content.size(); ++number) {
    const std::size_t end = std::min(content.find('\n', at), content.size());
    const std::string_view physical = content.substr(at, end - at);
    at = end + 1;
    if (std::any_of(physical.begin(), physical.end(), [](char c) { return c < ' ' || c > '~'; })) {
      refuse(number, "has a byte that torch does not write");
    }
    const std::string bare = without_texts(number, physical);
    if (depth == 0) {
      line = {.number = number,
              .indent = std::min(physical.find_first_not_of(' '), physical.size()),
              .text = ""};
    } else {
      line.text += ' ';
    }
    line.text += stripped(bare);
    for (const char c : bare) {
      if (c == '(' || c == '[' || c == '{') ++depth;
      if (c == ')' || c == ']' || c == '}') --depth;
    }
    if (depth < 0) refuse(number, "closes a bracket that is not open");
    if (depth == 0 && !line.text.empty()) lines.push_back(line);
  }
  if (depth != 0) throw std::invalid_argument("a bracket is not closed");
  return lines;
}

// The type of a tuple without items is the one thing with round brackets.
bool is_literal(std::string_view part) {
  std::string plain(part);
  for (auto at = plain.find("[()]"); at != std::string::npos; at = plain.find("[()]", at)) {
    plain.replace(at, 4, "[]");
  }
  return consists_of(plain, ".,:=[]{}\" +-");
}

// "class NAME:" or "class NAME(NAME):"
bool is_class(std::string_view line) {
  if (!line.starts_with("class ") || !line.ends_with(":")) return false;
  line = line.substr(6, line.size() - 7);
  const auto open = line.find('(');
  if (open == std::string_view::npos) return is_dotted(line);
  return is_dotted(line.substr(0, open)) && line.ends_with(")") &&
         is_dotted(line.substr(open + 1, line.size() - open - 2));
}

// "def NAME(PARAMETERS):" or "def NAME(PARAMETERS) -> TYPE:"
bool is_function(std::string_view line) {
  const auto open = line.find('(');
  const auto close = line.rfind(')');
  if (!line.ends_with(":") || open == std::string_view::npos || close == std::string_view::npos ||
      close < open || open < 5 || !consists_of(line.substr(4, open - 4), "")) {
    return false;
  }
  const std::string_view behind = line.substr(close + 1, line.size() - close - 2);
  const bool typed = behind.starts_with(" -> ") && behind.size() > 4;
  return is_literal(line.substr(open + 1, close - open - 1)) &&
         (behind.empty() || (typed && consists_of(behind.substr(4), ".,[] ")));
}

// "def __setstate__(self: TYPE, state: Tuple[TYPES]) -> NoneType:"
bool is_setstate(std::string_view line) {
  constexpr std::string_view kSelf = "self: ";
  constexpr std::string_view kTuple = ", state: Tuple[";
  constexpr std::string_view kEnd = "]) -> NoneType:";
  if (!line.starts_with(kSetStateHeader) || !line.ends_with(kEnd)) return false;
  line.remove_prefix(kSetStateHeader.size());
  line.remove_suffix(kEnd.size());
  const auto tuple = line.find(kTuple);
  return line.starts_with(kSelf) && tuple != std::string_view::npos && tuple > kSelf.size() &&
         is_dotted(line.substr(kSelf.size(), tuple - kSelf.size())) &&
         consists_of(line.substr(tuple + kTuple.size()), "., []");
}

// "(state)[N]" or a name or number.
bool is_operand(std::string_view part) {
  if (!part.starts_with(kState)) return is_dotted(part);
  part.remove_prefix(kState.size());
  return part.size() > 1 && part.ends_with("]") &&
         std::all_of(part.begin(), part.end() - 1, [](char c) { return c >= '0' && c <= '9'; });
}

bool are_operands(std::string_view parts) {
  for (;;) {
    const auto comma = parts.find(", ");
    if (!is_operand(parts.substr(0, comma))) return false;
    if (comma == std::string_view::npos) return true;
    parts.remove_prefix(comma + 2);
  }
}

// "torch.add" -> "aten::add", "ops.tessera.lookup" -> "tessera::lookup".
std::string operator_name(std::string_view called) {
  constexpr std::string_view kTorch = "torch.";
  constexpr std::string_view kOps = "ops.";
  if (called.starts_with(kTorch) && consists_of(called.substr(kTorch.size()), "")) {
    return "aten::" + std::string(called.substr(kTorch.size()));
  }
  if (called.starts_with(kOps)) {
    const std::string_view rest = called.substr(kOps.size());
    const auto point = rest.find('.');
    if (point != std::string_view::npos && consists_of(rest.substr(point + 1), "")) {
      return std::string(rest.substr(0, point)) + "::" + std::string(rest.substr(point + 1));
    }
  }
  return std::string(called);
}

// A statement of __setstate__: "NAME = OPERAND" or "NAME = OPERATOR(OPERANDS)", where NAME may be
// an attribute; or "return None".
void check_statement(const Line& line, const std::set<std::string>& more) {
  constexpr std::string_view kSelf = "self.";
  std::string_view rest = line.text;
  if (rest == "return None") return;
  const auto equals = rest.find(" = ");
  std::string_view target = rest.substr(0, equals);
  if (target.starts_with(kSelf)) target.remove_prefix(kSelf.size());
  const bool assigns =
      equals != std::string_view::npos && !target.empty() && consists_of(target, "");
  const std::string_view value = assigns ? rest.substr(equals + 3) : "";
  if (assigns && is_operand(value)) return;
  const auto open = value.find('(');
  const bool calls = assigns && open != std::string_view::npos && value.ends_with(")") &&
                     is_dotted(value.substr(0, open)) &&
                     are_operands(value.substr(open + 1, value.size() - open - 2));
  if (!calls) refuse(line.number, "would run while torch opens it and is not plain enough");
  const std::string_view called = value.substr(0, open);
  if (!is_allowed(operator_name(called), more)) {
    refuse(line.number, text("would call ", called, " while torch opens it"));
  }
}

// What the deeper lines belong to.
enum class Scope { kNone, kClass, kFunction, kSetState };

Scope begin_function(const Line& line) {
  if (!is_function(line.text)) {
    refuse(line.number, "computes something where only a literal may be");
  }
  if (!line.text.starts_with(kSetStateHeader)) return Scope::kFunction;
  if (!is_setstate(line.text)) {
    refuse(line.number, "defines __setstate__ in a way that packages do not have");
  }
  return Scope::kSetState;
}

}  // namespace

bool is_allowed(const std::string& name, const std::set<std::string>& more) {
  return std::binary_search(kAllowedOperators.begin(), kAllowedOperators.end(), name) ||
         more.contains(name);
}

void check_source(std::span<const std::byte> content, const std::set<std::string>& more) {
  if (content.size() > kMaxCodeBytes) {
    throw std::invalid_argument(text("it has more than ", kMaxCodeBytes, " bytes"));
  }
  Scope scope = Scope::kNone;
  bool in_class = false;
  for (const Line& line :
       read_lines({reinterpret_cast<const char*>(content.data()), content.size()})) {
    const bool deep = line.indent >= (in_class ? 4U : 2U);
    const bool member = line.indent == 0 || (line.indent == 2 && in_class);
    if (deep && scope == Scope::kSetState) {
      check_statement(line, more);
    } else if (deep && scope == Scope::kFunction) {
      continue;
    } else if (line.indent == 0 && is_class(line.text)) {
      scope = Scope::kClass;
      in_class = true;
    } else if (member) {
      in_class = in_class && line.indent == 2;
      const bool function = line.text.starts_with("def ");
      if (!function && !is_literal(line.text)) {
        refuse(line.number, "computes something where only a literal may be");
      }
      scope = function ? begin_function(line) : Scope::kNone;
    } else {
      refuse(line.number, "is not laid out as torch writes it");
    }
  }
}

}  // namespace tessera
