#include "request/strings.h"

#include <charconv>
#include <span>

#include "common/text.h"
#include "csrc/xxh64.h"
#include "request/packed.h"
#include "request/wire_reader.h"

namespace tessera {
namespace {

// The next string of a raw tensor.
bool read_raw(WireReader& reader, Bytes& string) {
  Bytes head;
  return reader.fixed(kStringHeadBytes, head) &&
         reader.fixed(load<std::uint32_t>(head.data(), 0), string);
}

// Calls visit(string) for each of the strings until it returns false; false where it did.
template <typename Visit>
bool visit_fields(WireReader message, std::span<const std::uint32_t> path, const Visit& visit) {
  const bool last = path.size() == 1 || path[1] == 0;
  return read_fields(message, [&](WireReader& reader, Tag tag, bool& handled) {
    handled = is(tag, path[0], WireType::kBytes);
    if (!handled) return true;
    Bytes content;
    reader.bytes(content);
    return last ? visit(content) : visit_fields(reader.inside(content), path.subspan(1), visit);
  });
}

template <typename Visit>
bool visit_strings(const StringsView& strings, const Visit& visit) {
  WireReader reader(strings.message);
  if (strings.path[0] != 0) return visit_fields(reader, strings.path, visit);
  Bytes string;
  while (!reader.done()) {
    if (!read_raw(reader, string) || !visit(string)) return false;
  }
  return true;
}

bool read_decimal(Bytes string, std::int64_t& id) {
  const auto* const begin = reinterpret_cast<const char*>(string.data());
  const char* const end = begin + string.size();
  const auto [stopped, error] = std::from_chars(begin, end, id);
  return error == std::errc() && stopped == end && !string.empty();
}

bool read_hex(Bytes string, std::int64_t& id) {
  const auto* const begin = reinterpret_cast<const char*>(string.data());
  const char* const end = begin + string.size();
  if (string.empty() || string.size() > kMaxHexDigits || *begin == '-') return false;
  const auto [stopped, error] = std::from_chars(begin, end, id, 16);
  return error == std::errc() && stopped == end;
}

// The row of the string at `index` among those of `feature`.
std::int64_t row_of(Bytes lengths, std::int64_t rows, std::size_t feature, std::int64_t index) {
  const std::byte* const of_feature =
      lengths.data() + feature * static_cast<std::size_t>(rows) * sizeof(std::int32_t);
  std::int64_t row = 0;
  while (index >= load<std::int32_t>(of_feature, static_cast<std::size_t>(row))) {
    index -= load<std::int32_t>(of_feature, static_cast<std::size_t>(row++));
  }
  return row;
}

}  // namespace

std::int64_t count_raw_strings(Bytes raw) {
  WireReader reader(raw);
  std::int64_t count = 0;
  for (Bytes string; !reader.done(); ++count) {
    if (!read_raw(reader, string)) return -1;
  }
  return count;
}

Status make_ids(std::string_view field, const std::vector<const FeatureSpec*>& features,
                const std::vector<std::int64_t>& counts, Bytes lengths, std::int64_t rows,
                const StringsView& strings, std::vector<std::int64_t>& ids) {
  ids.clear();
  ids.reserve(strings.count);
  std::size_t feature = 0;
  std::int64_t in_feature = 0;
  Status status;
  const auto refuse = [&](const std::string& why) {
    status = Status::invalid(text(field, ": feature '", features[feature]->name, "', row ",
                                  row_of(lengths, rows, feature, in_feature), ": ", why));
    return false;
  };
  visit_strings(strings, [&](Bytes string) {
    while (in_feature == counts[feature]) {
      ++feature;
      in_feature = 0;
    }
    if (string.size() > kMaxStringBytes) {
      return refuse(text("a string has ", string.size(), " bytes, the limit is ", kMaxStringBytes));
    }
    std::int64_t id = 0;
    if (features[feature]->strings) {
      id = static_cast<std::int64_t>(xxh64(string.data(), string.size()));
    } else if (features[feature]->hex) {
      if (!read_hex(string, id)) {
        return refuse(text("a string of ", string.size(),
                           " bytes is not 1 to 8 hexadecimal digits, as the feature's ids are"));
      }
    } else if (!read_decimal(string, id)) {
      return refuse(text("a string of ", string.size(),
                         " bytes is not a whole number of 64 bits in decimal digits, and the "
                         "feature's ids are numbers"));
    }
    ids.push_back(id);
    ++in_feature;
    return true;
  });
  return status;
}

}  // namespace tessera
