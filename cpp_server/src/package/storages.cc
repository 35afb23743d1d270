#include "package/storages.h"

#include <algorithm>
#include <deque>
#include <stdexcept>
#include <string_view>
#include <utility>

#include "common/text.h"
#include "package/format_rules.h"
#include "package/pickle_depth.h"

namespace tessera {
namespace {

// The opcodes of pickle that torch writes (docs.python.org/3/library/pickletools.html).
enum Opcode : unsigned char {
  kMark = '(',
  kTuple = 't',
  kPersistentId = 'Q',
  kInt4 = 'J',
  kInt1 = 'K',
  kInt2 = 'M',
  kLong = 0x8a,
  kText = 'X',
  kGlobal = 'c',  // a module and a name in it, each with a line feed
  kPut1 = 'q',
  kPut4 = 'r',
  kGet1 = 'h',
  kGet4 = 'j',
};

// One opcode and its argument; of the two kinds of argument only one is used.
struct Token {
  unsigned char opcode = 0;
  std::int64_t number = 0;
  std::string_view text = {};
  std::size_t begin = 0;
  std::size_t end = 0;  // behind the argument
};

[[noreturn]] void refuse(std::string_view why) { throw std::invalid_argument(std::string(why)); }

class Reader {
 public:
  explicit Reader(std::span<const std::byte> content)
      : content_(reinterpret_cast<const char*>(content.data()), content.size()) {}

  bool done() const { return at_ >= content_.size(); }

  Token next() {
    Token token{.begin = at_};
    token.opcode = static_cast<unsigned char>(take(1)[0]);
    switch (token.opcode) {
      case kMark:
      case kTuple:
      case kPersistentId:
      case ')':
      case ']':
      case '}':
      case 'e':
      case 'a':
      case 's':
      case 'u':
      case 'R':
      case 'b':
      case 'N':
      case '.':
      case '0':
      case '1':
      case '2':
      case 'l':
      case 'd':
      case 0x81:
      case 0x85:
      case 0x86:
      case 0x87:
      case 0x88:
      case 0x89: break;
      case 0x80:
      case kInt1:
      case kPut1:
      case kGet1: token.number = integer(1); break;
      case kInt2: token.number = integer(2); break;
      case kInt4: token.number = static_cast<std::int32_t>(integer(4)); break;
      case kPut4:
      case kGet4: token.number = integer(4); break;
      case kLong: token.number = integer(static_cast<std::size_t>(integer(1))); break;
      case kText:
      case 'T': token.text = take(static_cast<std::size_t>(integer(4))); break;
      case 'U':
      case 0x8c: token.text = take(static_cast<std::size_t>(integer(1))); break;
      case 'G': take(8); break;
      case kGlobal: token.text = two_lines(); break;
      default: refuse(text("opcode ", int{token.opcode}));
    }
    token.end = at_;
    return token;
  }

 private:
  std::string_view take(std::size_t count) {
    if (count > content_.size() - at_) refuse("it is cut short");
    const auto taken = content_.substr(at_, count);
    at_ += count;
    return taken;
  }

  std::string_view two_lines() {
    const auto first = content_.find('\n', at_);
    const auto second = first == std::string_view::npos ? first : content_.find('\n', first + 1);
    if (second == std::string_view::npos) refuse("it is cut short");
    return take(second + 1 - at_);
  }

  // Little-endian and unsigned, but where all 64 bits are used.
  std::int64_t integer(std::size_t bytes) {
    if (bytes > 8) refuse("a number of more than 64 bits");
    std::uint64_t value = 0;
    const auto taken = take(bytes);
    for (std::size_t i = 0; i < bytes; ++i) {
      value |= std::uint64_t{static_cast<unsigned char>(taken[i])} << (8 * i);
    }
    return static_cast<std::int64_t>(value);
  }

  std::string_view content_;
  std::size_t at_ = 0;
};

bool is_integer(const Token& token) {
  return token.opcode == kInt1 || token.opcode == kInt2 || token.opcode == kInt4 ||
         token.opcode == kLong;
}

bool is_get(const Token& token) { return token.opcode == kGet1 || token.opcode == kGet4; }

// A size as torch pickles it.
std::string pickled(std::uint64_t size) {
  const auto [opcode, bytes] = size < 1U << 8    ? std::pair(kInt1, 1)
                               : size < 1U << 16 ? std::pair(kInt2, 2)
                               : size < 1U << 31 ? std::pair(kInt4, 4)
                                                 : std::pair(kLong, 8);
  std::string out(1, static_cast<char>(opcode));
  if (opcode == kLong) out += '\x08';
  for (int i = 0; i < bytes; ++i) out += static_cast<char>(size >> (8 * i));
  return out;
}

// Whether a pickle may name `module` and `name` (each with a line feed): torch's own way of
// tensors, and the archive's classes.
void check_name(std::string_view two_lines) {
  std::string name(two_lines.substr(0, two_lines.size() - 1));
  std::replace(name.begin(), name.end(), '\n', '.');
  const bool own = name.starts_with("__torch__.") && !name.starts_with("__torch__.torch.classes.");
  const bool storage = std::any_of(kElementBytes.begin(), kElementBytes.end(),
                                   [&](const auto& known) { return known.first == name; });
  if (own || storage || std::binary_search(kPickleNames.begin(), kPickleNames.end(), name)) return;
  const bool shown =
      std::all_of(name.begin(), name.end(), [](char c) { return c > ' ' && c < 127; });
  refuse(text("it names '", shown ? name.substr(0, 200) : "?", "', which no package may"));
}

}  // namespace

// Collects what Storages holds: follows the opcodes with what stands around a storage in view, and
// nothing else.
class StorageFinder {
 public:
  explicit StorageFinder(std::map<std::string, Storages::Storage>& found) : found_(found) {}

  void run(Reader reader) {
    while (!reader.done()) {
      const Token token = reader.next();
      if (token.opcode == kGlobal) check_name(token.text);
      depth_.follow(token.opcode, token.number);
      if (token.opcode == kPut1 || token.opcode == kPut4) {
        remember(token.number);
        continue;
      }
      follow(token);
      Seen seen{.token = token, .key = ""};
      if (token.opcode == kPersistentId) {
        seen.key = new_storage();
      } else if (is_get(token)) {
        const auto known = memo_.find(token.number);
        if (known != memo_.end()) seen.key = known->second.key;
      }
      if (!seen.key.empty()) open_.push_back({.key = seen.key, .after = {}});
      recent_.push_back(std::move(seen));
      if (recent_.size() > kRecent) recent_.pop_front();
      if (token.opcode == '.') {
        if (!reader.done()) refuse("there are bytes behind its end");
        if (!open_.empty()) break;
        return;
      }
    }
    refuse("it is cut short");
  }

 private:
  static constexpr std::size_t kRecent = 7;  // what a persistent id is made of
  static constexpr std::int64_t kMostElements = std::int64_t{1} << 48;
  static constexpr std::size_t kAfter = 4;  // opcodes that say of a tensor whether it is the whole

  struct Seen {
    Token token;
    std::string key;  // the storage that begins here; empty: none
  };
  struct Open {
    std::string key;
    std::vector<Token> after;
  };

  void remember(std::int64_t number) {
    if (recent_.empty()) refuse("it numbers nothing");
    const Seen& last = recent_.back();
    const auto known = is_get(last.token) ? memo_.find(last.token.number) : memo_.end();
    const Seen meant = known == memo_.end() ? last : known->second;
    if (meant.key.empty() && meant.token.opcode != kText && meant.token.opcode != kGlobal) {
      memo_.erase(number);
      return;
    }
    memo_[number] = meant;
    if (memo_.size() > kMaxRemembered) {
      refuse(text("it numbers more than ", kMaxRemembered, " texts"));
    }
  }

  std::string text_of(const Token& token, Opcode opcode = kText) const {
    const auto known = is_get(token) ? memo_.find(token.number) : memo_.end();
    if (is_get(token) && known == memo_.end()) refuse("what it refers to is not there");
    const Token& meant = is_get(token) ? known->second.token : token;
    if (meant.opcode != opcode) refuse("no text where one belongs");
    return std::string(meant.text);
  }

  // Notes what the seven tokens before a persistent id say:
  // ("storage", type, key, device, elements).
  std::string new_storage() {
    if (recent_.size() < kRecent) refuse("a storage is described in another way");
    const auto token = [&](std::size_t at) -> const Token& { return recent_[at].token; };
    std::string key = text_of(token(3));
    const bool shaped = token(0).opcode == kMark && token(6).opcode == kTuple &&
                        is_integer(token(5)) && token(5).number >= 0 &&
                        token(5).number <= kMostElements && text_of(token(1)) == "storage";
    text_of(token(4));
    std::string kind = text_of(token(2), kGlobal);
    std::replace(kind.begin(), kind.end(), '\n', '.');
    if (!kind.empty()) kind.pop_back();
    const auto* const known = std::find_if(kElementBytes.begin(), kElementBytes.end(),
                                           [&](const auto& each) { return each.first == kind; });
    if (!shaped || known == kElementBytes.end() || key.empty() || found_.contains(key)) {
      refuse("a storage is described in another way");
    }
    found_[key] = {.elements = token(5).number,
                   .element_bytes = known->second,
                   .numbers = {{token(5).begin, token(5).end}},
                   .plain = kind == "torch.ByteStorage"};
    return key;
  }

  void follow(const Token& token) {
    for (Open& open : open_) {
      open.after.push_back(token);
      if (open.after.size() == kAfter) add_tensor(open.after, found_.at(open.key));
    }
    std::erase_if(open_, [](const Open& open) { return open.after.size() == kAfter; });
  }

  // Notes the tensor behind a storage: offset, then a tuple of sizes.
  static void add_tensor(const std::vector<Token>& after, Storages::Storage& storage) {
    const bool whole = is_integer(after[0]) && after[0].number == 0 && after[1].opcode == kMark &&
                       is_integer(after[2]) && after[3].opcode == kTuple &&
                       after[2].number == storage.elements;
    storage.plain = storage.plain && whole;
    if (storage.plain) storage.numbers.push_back({after[2].begin, after[2].end});
  }

  std::map<std::string, Storages::Storage>& found_;
  PickleDepth depth_;
  std::deque<Seen> recent_;  // without the opcodes that number what stands before them
  std::vector<Open> open_;   // storages whose tensor is not read yet
  std::map<std::int64_t, Seen> memo_;
};

Storages::Storages(std::span<const std::byte> content, const char* record) : content_(content) {
  try {
    StorageFinder(storages_).run(Reader(content));
  } catch (const std::invalid_argument& error) {
    throw std::invalid_argument(text(record, " is not as torch writes it: ", error.what()));
  }
}

std::map<std::string, std::uint64_t> Storages::bytes() const {
  std::map<std::string, std::uint64_t> bytes;
  for (const auto& [key, storage] : storages_) {
    bytes[key] = static_cast<std::uint64_t>(storage.elements) *
                 static_cast<std::uint64_t>(storage.element_bytes);
  }
  return bytes;
}

bool Storages::plain(const std::string& key) const {
  const auto found = storages_.find(key);
  return found != storages_.end() && found->second.plain;
}

std::vector<std::byte> Storages::with_sizes(
    const std::map<std::string, std::uint64_t>& sizes) const {
  std::vector<std::pair<Place, std::uint64_t>> replaced;
  for (const auto& [key, size] : sizes) {
    for (const Place& place : storages_.at(key).numbers) replaced.emplace_back(place, size);
  }
  std::sort(replaced.begin(), replaced.end(),
            [](const auto& a, const auto& b) { return a.first.begin < b.first.begin; });
  std::vector<std::byte> out;
  const auto append = [&](std::span<const std::byte> piece) {
    out.insert(out.end(), piece.begin(), piece.end());
  };
  std::size_t done = 0;
  for (const auto& [place, size] : replaced) {
    append(content_.subspan(done, place.begin - done));
    const std::string number = pickled(size);
    append(std::as_bytes(std::span(number)));
    done = place.end;
  }
  append(content_.subspan(done));
  return out;
}

}  // namespace tessera
