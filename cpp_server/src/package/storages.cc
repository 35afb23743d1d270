#include "package/storages.h"

#include <algorithm>
#include <stdexcept>
#include <string_view>
#include <utility>

#include "common/text.h"

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

[[noreturn]] void refuse(std::string_view why) {
  throw std::invalid_argument(text(kDataRecord, " is not as torch writes it: ", why));
}

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

}  // namespace

// Collects what Storages holds.
class StorageFinder {
 public:
  explicit StorageFinder(std::map<std::string, Storages::Storage>& found) : found_(found) {}

  void run(Reader reader) {
    while (!reader.done()) {
      const Token token = reader.next();
      if (token.opcode == kPut1 || token.opcode == kPut4) {
        if (plain_.empty()) refuse("nothing is stored");
        const auto known = keys_.find(plain_.size() - 1);
        memo_[token.number] = {plain_.back(), known == keys_.end() ? "" : known->second};
        continue;
      }
      plain_.push_back(token);
      if (token.opcode == kPersistentId) {
        keys_[plain_.size() - 1] = new_storage();
      } else if (is_get(token)) {
        const Remembered& meant = remembered(token);
        if (!meant.key.empty()) keys_[plain_.size() - 1] = meant.key;
      }
    }
    for (const auto& [at, key] : keys_) add_tensor(at, found_.at(key));
  }

 private:
  struct Remembered {
    Token token;
    std::string key;  // the storage that it is; empty: none
  };

  const Remembered& remembered(const Token& get) const {
    const auto found = memo_.find(get.number);
    if (found == memo_.end()) refuse("what it refers to is not there");
    return found->second;
  }

  std::string text_of(const Token& token, Opcode opcode = kText) const {
    const Token& meant = is_get(token) ? remembered(token).token : token;
    if (meant.opcode != opcode) refuse("no text where one belongs");
    return std::string(meant.text);
  }

  // Notes what the seven tokens before a persistent id say:
  // ("storage", type, key, device, elements).
  std::string new_storage() {
    if (plain_.size() < 8) refuse("a storage is described in another way");
    const Token* const before = plain_.data() + plain_.size() - 8;
    std::string key = text_of(before[3]);
    const bool shaped = before[0].opcode == kMark && before[6].opcode == kTuple &&
                        is_integer(before[5]) && text_of(before[1]) == "storage";
    text_of(before[4]);
    if (!shaped || key.empty() || found_.contains(key)) {
      refuse("a storage is described in another way");
    }
    elements_[key] = before[5].number;
    found_[key] = {.numbers = {{before[5].begin, before[5].end}},
                   .plain = text_of(before[2], kGlobal) == "torch\nByteStorage\n"};
    return key;
  }

  // Notes the tensor behind a storage: offset, then a tuple of sizes.
  void add_tensor(std::size_t at, Storages::Storage& storage) const {
    if (at + 4 >= plain_.size()) refuse("it is cut short");
    const Token* const after = plain_.data() + at + 1;
    const bool whole = is_integer(after[0]) && after[0].number == 0 && after[1].opcode == kMark &&
                       is_integer(after[2]) && after[3].opcode == kTuple &&
                       after[2].number == elements_.at(keys_.at(at));
    storage.plain = storage.plain && whole;
    storage.numbers.push_back({after[2].begin, after[2].end});
  }

  std::map<std::string, Storages::Storage>& found_;
  std::vector<Token> plain_;  // without the opcodes that number what stands before them
  std::map<std::size_t, std::string> keys_;  // the storage that begins at a token of plain_
  std::map<std::string, std::int64_t> elements_;
  std::map<std::int64_t, Remembered> memo_;
};

Storages::Storages(std::span<const std::byte> content) : content_(content) {
  StorageFinder(storages_).run(Reader(content));
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
