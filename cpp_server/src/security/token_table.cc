#include "security/token_table.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <utility>
#include <vector>

#include "common/flags.h"
#include "common/text.h"
#include "repository/small_file.h"

namespace tessera {
namespace {

constexpr std::size_t kMaxFileBytes = std::size_t{1} << 20;
constexpr std::size_t kMaxNameBytes = 64;
constexpr std::size_t kMostWhole = 10;  // digits of a rate
constexpr std::size_t kMostFraction = 6;
constexpr double kMaxCallsPerS = 1e9;
constexpr std::int64_t kBurstNs = 1'000'000'000;

bool is_digit(char c) { return c >= '0' && c <= '9'; }

bool is_word(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || is_digit(c) || c == '.' || c == '_' ||
         c == '-';
}

bool is_token(std::string_view text) {
  while (text.ends_with('=')) text.remove_suffix(1);
  return !text.empty() && std::all_of(text.begin(), text.end(), [](char c) {
    return is_word(c) || c == '~' || c == '+' || c == '/';
  });
}

bool is_name(std::string_view text) {
  return text.size() <= kMaxNameBytes && std::all_of(text.begin(), text.end(), is_word);
}

// A positive number without sign or exponent; nothing where `text` is another.
std::optional<double> rate_of(const std::string& text) {
  const auto point = text.find('.');
  const std::string whole = text.substr(0, point);
  const std::string fraction = point == std::string::npos ? "0" : text.substr(point + 1);
  const auto digits = [](const std::string& part, std::size_t most) {
    return !part.empty() && part.size() <= most && std::all_of(part.begin(), part.end(), is_digit);
  };
  if (!digits(whole, kMostWhole) || !digits(fraction, kMostFraction)) return std::nullopt;
  const auto rate = parse_number<double>("", text);
  return rate > 0 && rate <= kMaxCallsPerS ? std::optional(rate) : std::nullopt;
}

std::vector<std::string> words_of(std::string_view line) {
  std::istringstream in{std::string(line)};
  std::vector<std::string> words;
  for (std::string word; in >> word;) words.push_back(std::move(word));
  return words;
}

TokenTable::Digest digest_of(std::string_view token) {
  TokenTable::Digest digest{};
  if (::EVP_Digest(token.data(), token.size(), digest.data(), nullptr, ::EVP_sha256(), nullptr) !=
      1) {
    throw std::runtime_error("OpenSSL has no SHA-256");
  }
  return digest;
}

std::uint64_t key_of(const TokenTable::Digest& digest) {
  std::uint64_t key = 0;
  std::memcpy(&key, digest.data(), sizeof(key));
  return key;
}

}  // namespace

std::int64_t next_full_until(std::int64_t full_until, std::int64_t now, double calls_per_s) {
  const auto cost = static_cast<std::int64_t>(1e9 / calls_per_s);
  const std::int64_t after = std::max(full_until, now) + cost;
  return after - now <= std::max(kBurstNs, cost) ? after : -1;
}

bool TokenTable::Token::take(TimePoint now) const {
  if (calls_per_s_ == 0) return true;
  std::int64_t so_far = full_until_.load();
  std::int64_t after = 0;
  do {
    after = next_full_until(so_far, now.time_since_epoch().count(), calls_per_s_);
    if (after < 0) return false;
  } while (!full_until_.compare_exchange_weak(so_far, after));
  return true;
}

std::unique_ptr<const TokenTable> TokenTable::parse(std::string_view content) {
  auto table = std::make_unique<TokenTable>();
  std::size_t number = 0;
  while (!content.empty()) {
    const auto end = std::min(content.find('\n'), content.size());
    table->add(content.substr(0, end), ++number);
    content.remove_prefix(std::min(end + 1, content.size()));
  }
  if (table->size() == 0) throw UsageError("holds no token; give one on each line");
  return table;
}

void TokenTable::add(std::string_view line, std::size_t number) {
  const std::vector<std::string> words = words_of(line);
  if (words.empty() || words[0].starts_with('#')) return;
  if (!is_token(words[0])) {
    throw UsageError(text("line ", number,
                          " has no token; give letters, digits and -._~+/, then = where they are "
                          "needed"));
  }
  if (words.size() > 1 && !is_name(words[1])) {
    throw UsageError(text("line ", number, " has no name; give up to ", kMaxNameBytes,
                          " letters, digits and -._"));
  }
  std::optional<double> rate = 0;
  if (words.size() > 2) rate = rate_of(words[2]);
  if (words.size() > 3 || !rate.has_value()) {
    throw UsageError(
        text("line ", number, " is not TOKEN [NAME [CALLS_PER_S]]; give a positive number"));
  }
  const Digest digest = digest_of(words[0]);
  if (find(digest) != nullptr) {
    throw UsageError(text("line ", number, " has a token that an earlier line has, too; keep one"));
  }
  tokens_.emplace(key_of(digest),
                  std::make_unique<const Token>(words.size() > 1 ? words[1] : text("line-", number),
                                                *rate, digest));
}

std::unique_ptr<const TokenTable> TokenTable::read(const std::string& path) {
  const std::optional<std::string> content = read_small_file(path, kMaxFileBytes);
  if (!content.has_value()) throw UsageError(path + ": there is no such file");
  const bool ascii = std::all_of(content->begin(), content->end(),
                                 [](char c) { return static_cast<unsigned char>(c) < 128; });
  if (!ascii) throw UsageError(path + ": has bytes that are not ASCII");
  try {
    return parse(*content);
  } catch (const UsageError& error) {
    throw UsageError(text(path, ": ", error.what()));
  }
}

const TokenTable::Token* TokenTable::find(std::string_view token) const {
  return find(digest_of(token));
}

const TokenTable::Token* TokenTable::find(const Digest& digest) const {
  const auto [first, last] = tokens_.equal_range(key_of(digest));
  for (auto one = first; one != last; ++one) {
    if (::CRYPTO_memcmp(one->second->digest_.data(), digest.data(), digest.size()) == 0) {
      return one->second.get();
    }
  }
  return nullptr;
}

void TokenTable::count_on_from(const TokenTable& former) const {
  for (const auto& [key, token] : tokens_) {
    const Token* const same = former.find(token->digest_);
    if (same != nullptr) token->full_until_.store(same->full_until_.load());
  }
}

}  // namespace tessera
