#include "request/checks.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "common/text.h"
#include "request/packed.h"

namespace tessera {

Status check_size(std::string_view field, Bytes content, std::int64_t count, std::size_t item_bytes,
                  std::string_view type, std::string_view meaning) {
  const auto expected = static_cast<std::uint64_t>(count) * item_bytes;
  if (content.size() == expected) return {};
  return Status::invalid(text(field, " has ", content.size(), " bytes, expected ", expected, " (",
                              meaning, " = ", count, " ", type, " numbers)"));
}

Status read_jagged(const GroupNames& names, const SparseFeaturesView& message, std::int64_t F,
                   std::int64_t rows, std::string_view meaning, JaggedView& group) {
  if (Status status = check_size(names.lengths, message.lengths, F * rows, 4, "int32", meaning);
      !status.ok()) {
    return status;
  }
  group.lengths = message.lengths;
  group.ids.assign(static_cast<std::size_t>(F), 0);
  std::int64_t total = 0;
  for (std::int64_t f = 0; f < F; ++f) {
    std::int64_t sum = 0;
    std::int32_t least = 0;
    const std::byte* const row = message.lengths.data() + f * rows * 4;
    for (std::int64_t b = 0; b < rows; ++b) {
      const auto length = load<std::int32_t>(row, static_cast<std::size_t>(b));
      sum += length;
      least = std::min(least, length);
    }
    if (least < 0) {
      std::size_t b = 0;
      while (load<std::int32_t>(row, b) >= 0) ++b;
      return Status::invalid(text(names.lengths, "[", static_cast<std::size_t>(f * rows) + b,
                                  "] is ", load<std::int32_t>(row, b), ", expected >= 0"));
    }
    group.ids[static_cast<std::size_t>(f)] = sum;
    total += sum;
  }
  group.strings = message.values_bytes;
  if (group.strings.count > 0) {
    const std::size_t numbers = message.values.size() + message.values_int64.size();
    if (numbers > 0) {
      return Status::invalid(text(names.group, " has ", group.strings.count, " values_bytes and ",
                                  numbers,
                                  " bytes of values or values_int64, expected only one of the "
                                  "three"));
    }
    group.values = {};
    group.wide = true;
    if (group.strings.count == static_cast<std::uint64_t>(total)) return {};
    return Status::invalid(text(names.values_bytes, " has ", group.strings.count,
                                " strings, expected ", total, " (sum(lengths))"));
  }
  group.wide = !message.values_int64.empty();
  if (group.wide) {
    if (!message.values.empty()) {
      return Status::invalid(text(names.group, " has ", message.values.size(),
                                  " bytes of values and ", message.values_int64.size(),
                                  " bytes of values_int64, expected only one of the two"));
    }
    group.values = message.values_int64;
    return check_size(names.values_int64, group.values, total, 8, "int64", "sum(lengths)");
  }
  group.values = message.values;
  // TorchRec's client sends what its tensors hold, int64 more often than int32.
  const bool two_fields = names.values != names.values_int64;
  group.wide =
      two_fields && total > 0 && group.values.size() == 8 * static_cast<std::uint64_t>(total);
  if (group.wide) return {};
  return check_size(names.values, group.values, total, 4, "int32", "sum(lengths)");
}

std::int64_t total_ids(const JaggedView& group) {
  return std::accumulate(group.ids.begin(), group.ids.end(), std::int64_t{0});
}

std::ptrdiff_t first_not_finite(Bytes floats, bool nan_passes) {
  const std::size_t count = floats.size() / sizeof(float);
  for (std::size_t i = 0; i < count; ++i) {
    const auto value = load<float>(floats.data(), i);
    if (!std::isfinite(value) && !(nan_passes && std::isnan(value))) {
      return static_cast<std::ptrdiff_t>(i);
    }
  }
  return -1;
}

std::int64_t id_at(const JaggedView& group, std::size_t index) {
  return group.wide ? load<std::int64_t>(group.values.data(), index)
                    : load<std::int32_t>(group.values.data(), index);
}

namespace {

// Whether one of `count` numbers is above `last` or, as a signed one, below zero. `last` is not
// negative, so that the sign of n | (last - n) tells; it is kept of a block of numbers at a time,
// for which compilers use vector instructions.
template <typename Unsigned>
bool any_above(const std::byte* numbers, std::size_t count, Unsigned last) {
  constexpr std::size_t kBlock = 64 / sizeof(Unsigned);
  std::array<Unsigned, kBlock> signs{};
  std::array<Unsigned, kBlock> block;
  for (; count >= kBlock; count -= kBlock, numbers += sizeof(block)) {
    std::memcpy(block.data(), numbers, sizeof(block));
    for (std::size_t i = 0; i < kBlock; ++i) signs[i] |= block[i] | (last - block[i]);
  }
  Unsigned all = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const auto number = load<Unsigned>(numbers, i);
    all |= number | (last - number);
  }
  for (const Unsigned sign : signs) all |= sign;
  return all >> (8 * sizeof(Unsigned) - 1) != 0;
}

}  // namespace

bool any_outside(const JaggedView& group, std::size_t first, std::size_t count, std::int64_t rows) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  const std::byte* const ids = group.values.data();
  return group.wide ? any_above(ids + first * 8, count, static_cast<std::uint64_t>(rows - 1))
                    : any_above(ids + first * 4, count,
                                static_cast<std::uint32_t>(std::min(rows - 1, kMost)));
}

}  // namespace tessera
