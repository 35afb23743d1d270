#include "package/commit.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>
#include <stdexcept>
#include <string_view>

#include "common/text.h"
#include "package/field_rules.h"
#include "package/format_rules.h"
#include "package/signature.h"
#include "package/strict_json.h"
#include "request/packed.h"

namespace tessera {
namespace {

using Json = nlohmann::json;

constexpr const char* kPackageRecord = "package.json";

[[noreturn]] void refuse(const std::string& why) { throw std::invalid_argument(why); }

// Whether `name` is `folder` and a number of at most nine digits without leading zeros.
bool is_numbered(std::string_view name, std::string_view folder) {
  if (!name.starts_with(folder)) return false;
  const std::string_view number = name.substr(folder.size());
  constexpr std::size_t kMostDigits = 9;
  return !number.empty() && number.size() <= kMostDigits && (number == "0" || number[0] != '0') &&
         std::all_of(number.begin(), number.end(), [](char c) { return c >= '0' && c <= '9'; });
}

bool is_known(std::string_view name) {
  return is_numbered(name, "rows/") || is_numbered(name, "bytes/") || name == kCommitGoldenRecord ||
         name == kPackageRecord;
}

void check_format_version(const Json& root) {
  const auto found = root.is_object() ? root.find("format_version") : root.end();
  const bool whole = root.is_object() && found != root.end() && found->is_number_integer();
  if (whole && *found == Json(kCommitFormatVersion)) return;
  refuse(text("the commit's format_version is ", whole ? found->dump() : "missing",
              ", this server reads ", kCommitFormatVersion,
              "; publish with the tessera that serves"));
}

PatchInfo read_patch(const Json& json) {
  return {.record = json.at("record").get<std::string>(),
          .table = json.at("table").get<std::string>(),
          .offset = json.at("offset").get<std::uint64_t>(),
          .stride = json.at("stride").get<std::uint64_t>(),
          .width = json.at("width").get<std::uint64_t>(),
          .count = json.at("count").get<std::uint64_t>(),
          .rows = json.at("rows").get<std::string>(),
          .bytes = json.at("bytes").get<std::string>()};
}

void check_size(const CommitInfo& commit, const std::string& where, std::string_view kind,
                const std::string& name, std::uint64_t count, std::uint64_t width) {
  if (!name.starts_with(text(kind, "/"))) {
    refuse(text(where, ".", kind, ": '", name, "' is not the name of such a record"));
  }
  std::uint64_t expected = 0;
  const bool huge = __builtin_mul_overflow(count, width, &expected);
  const auto found = commit.records.find(name);
  if (!huge && found != commit.records.end() && found->second.bytes == expected) return;
  refuse(text(where, ".", kind, ": record '", name, "' of ",
              huge ? std::string("too many") : std::to_string(expected), " bytes ",
              found == commit.records.end() ? std::string("is missing")
                                            : text("has ", found->second.bytes, " bytes")));
}

// What no single field's rule says.
void check_together(const CommitInfo& commit) {
  for (const auto& [name, info] : commit.records) {
    if (!is_known(name)) {
      refuse(text("commit.records: '", name, "' is not a record that commits have"));
    }
  }
  std::set<std::string> named = {kCommitGoldenRecord};
  for (std::size_t place = 0; place < commit.patches.size(); ++place) {
    const PatchInfo& patch = commit.patches[place];
    const std::string where = text("commit.patches[", place, "]");
    if (!is_numbered(patch.record, "data/")) {
      refuse(text(where, ".record: '", patch.record, "' is not one that can be patched"));
    }
    if (patch.width > patch.stride) {
      refuse(text(where, ".width: is ", patch.width, ", more than the stride, ", patch.stride));
    }
    if (!named.insert(patch.bytes).second) {
      refuse(text(where, ".bytes: '", patch.bytes, "' is named twice"));
    }
    check_size(commit, where, "bytes", patch.bytes, patch.count, patch.width);
    if (!patch.rows.empty()) check_size(commit, where, "rows", patch.rows, patch.count, 4);
  }
  for (const PatchInfo& patch : commit.patches) {
    if (!patch.rows.empty()) named.insert(patch.rows);
  }
  for (const std::string& name : named) {
    if (!commit.records.contains(name)) refuse(text("commit.records: '", name, "' is missing"));
  }
  for (const auto& [name, info] : commit.records) {
    if (name != kPackageRecord && !named.contains(name)) {
      refuse(text("commit.records: '", name, "' is named by no patch"));
    }
  }
}

// The end of row `row`; nothing where it is beyond every record.
std::optional<std::uint64_t> end_of(const PatchInfo& patch, std::uint64_t row) {
  std::uint64_t end = 0;
  if (__builtin_mul_overflow(row, patch.stride, &end) ||
      __builtin_add_overflow(end, patch.offset, &end) ||
      __builtin_add_overflow(end, patch.width, &end)) {
    return std::nullopt;
  }
  return end;
}

}  // namespace

std::uint64_t CommitInfo::rows() const {
  std::set<std::string>
      seen;  // where a row has a scale in another place, two patches have its number
  std::uint64_t count = 0;
  for (const PatchInfo& patch : patches) {
    if (patch.table.empty()) continue;
    if (patch.rows.empty() || seen.insert(patch.rows).second) count += patch.count;
  }
  return count;
}

CommitInfo parse_commit(std::span<const std::byte> json) {
  const Json root = parse_ascii_json(json, "commit.json", kMaxCommitMarks);
  check_format_version(root);
  read_signature(json, "commit.json");
  check_commit_fields(root);
  CommitInfo commit;
  commit.model = root.at("model").get<std::string>();
  commit.version = root.at("version").get<std::int64_t>();
  commit.number = root.at("number").get<std::int64_t>();
  commit.base = root.at("base").get<std::string>();
  commit.previous = root.at("previous").get<std::string>();
  if (const Json& newest = root.at("newest_example_s"); !newest.is_null()) {
    commit.newest_example_s = newest.get<double>();
  }
  for (const Json& patch : root.at("patches")) commit.patches.push_back(read_patch(patch));
  commit.golden_atol = root.at("golden").at("atol").get<double>();
  commit.golden_rtol = root.at("golden").at("rtol").get<double>();
  commit.records = read_record_infos(root.at("records"));
  check_together(commit);
  return commit;
}

void check_patch_fits(const PatchInfo& patch, std::size_t place,
                      std::optional<std::uint64_t> record_bytes) {
  if (!record_bytes.has_value()) {
    refuse(text("commit.patches[", place, "].record: the package has no '", patch.record, "'"));
  }
  const auto end = end_of(patch, patch.rows.empty() ? patch.count - 1 : 0);
  if (end.has_value() && *end <= *record_bytes) return;
  refuse(text("commit.patches[", place, "]: reaches past the ", *record_bytes, " bytes of '",
              patch.record, "'"));
}

void check_rows_fit(const PatchInfo& patch, std::size_t place, std::span<const std::byte> rows,
                    std::uint64_t record_bytes) {
  std::uint32_t last = load<std::uint32_t>(rows.data(), 0);
  for (std::size_t i = 1; i < patch.count; ++i) {
    const auto row = load<std::uint32_t>(rows.data(), i);
    if (row <= last) {
      refuse(text("commit.patches[", place, "]: the rows' numbers do not ascend"));
    }
    last = row;
  }
  const auto end = end_of(patch, last);
  if (end.has_value() && *end <= record_bytes) return;
  refuse(text("commit.patches[", place, "]: row ", last, " reaches past the ", record_bytes,
              " bytes of '", patch.record, "'"));
}

}  // namespace tessera
