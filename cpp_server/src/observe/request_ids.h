// The names under which a call is known beside this server: its request id and its trace.
//
// Contract: free functions without state; any thread. They may throw std::bad_alloc.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace tessera {

// A longer request id is cut.
inline constexpr std::size_t kMostRequestIdBytes = 1'024;

// Writes the id of a call whose header says `given` into `id`: that, where it has nothing but
// printable ASCII; where it does not, or is empty, 32 new hexadecimal digits.
void choose_request_id(std::string_view given, std::string& id);

// 64 random bits. Not secret.
std::uint64_t random_bits();

// At least 0 and below 1.
double random_share();

// Appends 16 hexadecimal digits of such bits.
void append_random_digits(std::string& id);

// What a traceparent header says; the views point into it.
struct TraceParent {
  std::string_view trace_id;  // 32 hexadecimal digits
  std::string_view span_id;   // 16
  bool sampled = false;
};

// Nothing where `header` is not as https://www.w3.org/TR/trace-context/ has it.
std::optional<TraceParent> read_traceparent(std::string_view header);

}  // namespace tessera
