// The file of --auth-token-file: one token a line, with a name and a limit of its calls if they are
// wanted.
//
//   # what follows '#' at the start of a line is not read
//   TOKEN [NAME [CALLS_PER_S]]
//
// A token consists of the characters that RFC 6750 allows. NAME is what refusals and metrics call
// it, by default "line-N". CALLS_PER_S bounds how many calls a second the token allows, on average;
// a second's worth of them may come at once. tests/server/token_cases.json holds this reader and
// the Python server's to one table of cases.
//
// A token is kept as its SHA-256 alone, so that how long a comparison takes says nothing of a
// token.
//
// Contract: a table does not change but for its counts; any thread, nothing blocks.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>

#include "common/clock.h"

namespace tessera {

// What a call at `now` makes of a token's "full until", both nanoseconds of one clock; -1: it is
// refused. Each call moves it 1 / rate seconds on, from now where it lies in the past, and is
// refused while that would lie more than a second ahead (or one call, where a second has less): the
// generic cell rate algorithm.
std::int64_t next_full_until(std::int64_t full_until, std::int64_t now, double calls_per_s);

class TokenTable {
 public:
  using Digest = std::array<unsigned char, 32>;

  class Token {
   public:
    Token(std::string name, double calls_per_s, const Digest& digest)
        : name_(std::move(name)), calls_per_s_(calls_per_s), digest_(digest) {}

    const std::string& name() const { return name_; }
    double calls_per_s() const { return calls_per_s_; }  // 0: any number

    // Counts a call; false: it is one too many.
    bool take(TimePoint now) const;

   private:
    friend class TokenTable;

    const std::string name_;
    const double calls_per_s_;
    const Digest digest_;
    mutable std::atomic<std::int64_t> full_until_ = 0;
  };

  // Throws UsageError, whose text is one line that names the line and quotes no token.
  static std::unique_ptr<const TokenTable> parse(std::string_view content);

  // The same of a file, which the text names, too.
  static std::unique_ptr<const TokenTable> read(const std::string& path);

  // The token with these characters; null where there is none.
  const Token* find(std::string_view token) const;

  std::size_t size() const { return tokens_.size(); }

  // Goes on counting where `former` is.
  void count_on_from(const TokenTable& former) const;

 private:
  const Token* find(const Digest& digest) const;
  void add(std::string_view line, std::size_t number);

  // By the first bytes of their digests.
  std::unordered_multimap<std::uint64_t, std::unique_ptr<const Token>> tokens_;
};

}  // namespace tessera
