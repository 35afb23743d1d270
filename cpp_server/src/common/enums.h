// How many enumerators an enum has, for tables that are indexed by one: an enumerator that is added
// without its row does not compile.
//
// Contract: constants; for enums whose enumerators are 0, 1, 2 and so on.
#pragma once

#include <cstddef>
#include <string_view>

namespace tessera {

// Whether `value` is one of its enum's enumerators. GCC and Clang write another value as a cast of
// a number, "(tessera::Stage)7".
template <auto value>
constexpr bool is_enumerator() {
  const std::string_view text = __PRETTY_FUNCTION__;  // ends with "value = VALUE]"
  std::size_t at = text.size() - 2;
  while (text[at] >= '0' && text[at] <= '9') --at;
  return text[at] != ')';
}

// The enumerators of the enum whose last one is `last`.
template <auto last>
constexpr std::size_t enum_size() {
  constexpr auto size = static_cast<std::size_t>(last) + 1;
  static_assert(!is_enumerator<static_cast<decltype(last)>(size)>(),
                "there is an enumerator behind this one; name the last");
  return size;
}

}  // namespace tessera
