// Command-line flags: --name VALUE or --name=VALUE.
//
// Contract: free functions without state. What a user got wrong throws UsageError, whose text
// is one line that names the flag, the value and the remedy.
#pragma once

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <functional>
#include <limits>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "common/text.h"

namespace tessera {

class UsageError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// A flag's value that has to be changed; who knows where the value stands can name that instead.
class FlagError : public UsageError {
 public:
  FlagError(std::string name, std::string value, std::string remedy);
  const std::string& name() const { return name_; }  // without the dashes
  const std::string& value() const { return value_; }
  const std::string& remedy() const { return remedy_; }

 private:
  std::string name_;
  std::string value_;
  std::string remedy_;
};

// One flag: how it is shown, what it says of itself and what it sets.
struct Flag {
  std::string name;     // without the dashes
  std::string metavar;  // empty: it takes no value
  std::string help;
  std::function<void(const std::string& value)> set;
  bool repeatable = false;
  bool in_file = true;         // a file of --config may give it (server/flag_sources.h)
  bool in_environment = true;  // a variable may give it
};

// Throws FlagError.
[[noreturn]] void refuse_flag(const std::string& name, const std::string& value,
                              const std::string& remedy);

template <typename T>
T parse_number(const std::string& name, const std::string& value) {
  T number{};
  const char* const end = value.data() + value.size();
  const auto parsed = std::from_chars(value.data(), end, number);
  if (parsed.ec != std::errc() || parsed.ptr != end) {
    refuse_flag(name, "'" + value + "'",
                std::is_integral_v<T> ? "give a whole number" : "give a number");
  }
  return number;
}

// A whole number between `least` and `most`.
template <typename T>
T checked_number(const std::string& name, const std::string& value, std::int64_t least,
                 std::int64_t most) {
  const auto parsed = parse_number<std::int64_t>(name, value);
  if (parsed < least) refuse_flag(name, value, text("give a whole number of at least ", least));
  const auto top = static_cast<std::int64_t>(std::min<std::uint64_t>(
      static_cast<std::uint64_t>(most), static_cast<std::uint64_t>(std::numeric_limits<T>::max())));
  if (parsed > top) refuse_flag(name, value, text("give a number of at most ", top));
  return static_cast<T>(parsed);
}

// A whole number between `least` and `most`; `target` holds the default.
template <typename T>
Flag number_flag(const std::string& name, const std::string& help, T& target, std::int64_t least,
                 std::int64_t most = std::numeric_limits<std::int64_t>::max()) {
  return {name, "N", text(help, " (default: ", target, ")"),
          [=, &target](const std::string& value) {
            target = checked_number<T>(name, value, least, most);
          }};
}

// A word of the command line after its flag; empty for a flag that takes no value.
struct GivenFlag {
  const Flag* flag;
  std::string value;
};

// The flags in `arguments` (those after the program's name), in their order; they point into
// `flags`.
std::vector<GivenFlag> split_flags(const std::vector<Flag>& flags,
                                   const std::vector<std::string>& arguments);

// Calls `set` of every flag in `arguments`.
void set_flags(const std::vector<Flag>& flags, const std::vector<std::string>& arguments);

// The list of flags that --help shows.
std::string flags_text(const std::vector<Flag>& flags);

}  // namespace tessera
