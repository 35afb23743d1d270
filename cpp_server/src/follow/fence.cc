#include "follow/fence.h"

#include <chrono>
#include <nlohmann/json.hpp>
#include <optional>
#include <stdexcept>

#include "common/file_lock.h"
#include "common/flags.h"
#include "common/text.h"
#include "package/format_rules.h"
#include "package/strict_json.h"
#include "repository/small_file.h"

namespace tessera {
namespace {

using Json = nlohmann::json;

constexpr int kFormat = 1;
constexpr std::ptrdiff_t kMaxMarks = kMaxFenceBytes;  // every one is a byte

// What somebody who adds to the fence may take.
constexpr Duration kPatience = std::chrono::seconds(10);

std::string path_of(const std::string& log) { return log + "/fenced.json"; }

[[noreturn]] void refuse(const std::string& why) { throw std::invalid_argument(why); }

// The fields of one object, no more and no fewer.
void check_keys(const Json& json, std::initializer_list<const char*> keys,
                const std::string& where) {
  if (!json.is_object()) refuse(where + ": is not an object");
  for (const char* const key : keys) {
    if (!json.contains(key)) refuse(text(where, ": missing key '", key, "'"));
  }
  if (json.size() != keys.size()) refuse(where + ": has an unknown key");
}

bool is_sha256(const Json& json) {
  constexpr std::size_t kDigits = 64;
  if (!json.is_string() || json.get_ref<const std::string&>().size() != kDigits) return false;
  return json.get_ref<const std::string&>().find_first_not_of("0123456789abcdef") ==
         std::string::npos;
}

Fence fence_of(const Json& root) {
  check_keys(root, {"format", "fenced"}, "fence");
  if (root.at("format") != kFormat || !root.at("format").is_number_integer()) {
    refuse("fence.format: is not 1");
  }
  if (!root.at("fenced").is_array()) refuse("fence.fenced: is not a list");
  Fence fence;
  for (const Json& one : root.at("fenced")) {
    check_keys(one, {"number", "sha256"}, "fence.fenced");
    const Json& number = one.at("number");
    const Json& sha256 = one.at("sha256");
    if (!number.is_number_integer() || number < 1 || number > kMaxCommitNumber) {
      refuse("fence.fenced: a number is not one of a commit");
    }
    if (!sha256.is_null() && !is_sha256(sha256)) refuse("fence.fenced: a hash is not one");
    const auto value = number.get<CommitNumber>();
    if (!fence.empty() && fence.rbegin()->first >= value) {
      refuse("fence.fenced: the numbers are not ascending");
    }
    fence[value] = sha256.is_null() ? "" : sha256.get<std::string>();
  }
  return fence;
}

}  // namespace

Fence parse_fence(std::string_view json, const std::string& file) {
  try {
    return fence_of(parse_ascii_json(std::as_bytes(std::span(json)), "it", kMaxMarks));
  } catch (const std::invalid_argument& error) {
    throw UsageError(text(file, ": is not a list of fenced commits (", error.what(),
                          "); restore it, or roll back anew"));
  }
}

Fence read_fence(const std::string& log) {
  const std::string path = path_of(log);
  const std::optional<std::string> json = read_small_file(path, kMaxFenceBytes);
  return json.has_value() ? parse_fence(*json, path) : Fence();
}

Fence write_fence(const std::string& log, const Fence& more) {
  const FileLock lock(log + "/.fenced.lock", kPatience);
  Fence all = read_fence(log);
  all.insert(more.begin(), more.end());
  nlohmann::ordered_json entries = nlohmann::ordered_json::array();
  for (const auto& [number, sha256] : all) {
    nlohmann::ordered_json entry{{"number", number}, {"sha256", nullptr}};
    if (!sha256.empty()) entry["sha256"] = sha256;
    entries.push_back(std::move(entry));
  }
  const nlohmann::ordered_json root{{"format", kFormat}, {"fenced", entries}};
  replace_file(path_of(log), root.dump(1) + "\n");
  return all;
}

}  // namespace tessera
