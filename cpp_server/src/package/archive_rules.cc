#include "package/archive_rules.h"

#include <algorithm>
#include <stdexcept>

#include "common/text.h"
#include "package/format_rules.h"
#include "package/layout.h"
#include "package/manifest.h"
#include "package/package_error.h"
#include "package/scripted_source.h"
#include "package/storages.h"

namespace tessera {
namespace {

constexpr std::string_view kDataFolder = "data/";
constexpr std::string_view kConstantsFolder = "constants/";
constexpr std::string_view kCodeFolder = "code/";

bool is_number(std::string_view part) {
  return !part.empty() &&
         std::all_of(part.begin(), part.end(), [](char c) { return c >= '0' && c <= '9'; });
}

bool is_plain(std::string_view part) {
  return std::all_of(part.begin(), part.end(), [](char c) {
    return c == '_' || c == '.' || c == '/' || (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') ||
           (c >= 'A' && c <= 'Z');
  });
}

bool is_known(std::string_view name) {
  static const std::set<std::string_view> known = {kDataRecord, kConstantsRecord, "version",
                                                   "byteorder", kGoldenRecord,    kManifestRecord};
  if (name.starts_with(kDataFolder)) return is_number(name.substr(kDataFolder.size()));
  if (name.starts_with(kConstantsFolder)) return is_number(name.substr(kConstantsFolder.size()));
  if (name.starts_with(kCodeFolder)) return is_plain(name) && name.ends_with(".py");
  return known.contains(name) || (name.starts_with('.') && is_plain(name));
}

// Whether each storage has the bytes that a pickle says; torch believes the pickle.
void check_pickle(const Records& records, const char* record, std::span<const std::byte> content) {
  if (content.size() > kMaxPickleBytes) {
    throw std::invalid_argument(text("it has more than ", kMaxPickleBytes, " bytes"));
  }
  const std::string_view name(record);
  const std::string folder(name.substr(0, name.find('.')));
  for (const auto& [key, expected] : Storages(content, record).bytes()) {
    const auto found =
        is_number(key) ? records.all().find(text(folder, "/", key)) : records.all().end();
    const bool missing = found == records.all().end();
    if (!missing && found->second.bytes == expected) continue;
    throw std::invalid_argument(text(record, " describes a storage of ", expected,
                                     " bytes, and its record ",
                                     missing ? "is missing" : text("has ", found->second.bytes)));
  }
}

}  // namespace

void check_names(const Records& records) {
  for (const auto& [name, record] : records.all()) {
    if (is_known(name)) continue;
    throw PackageError(records.file().path(),
                       text("record '", name, "' is not one that packages have"));
  }
}

void check_contents(const Records& records, const ParsedContents& contents,
                    const std::set<std::string>& allow_ops) {
  for (const auto& [name, content] : contents) {
    try {
      if (name.starts_with(kCodeFolder)) check_source(content, allow_ops);
      for (const char* const pickle : {kDataRecord, kConstantsRecord}) {
        if (name == pickle) check_pickle(records, pickle, content);
      }
    } catch (const std::invalid_argument& error) {
      throw PackageError(records.file().path(), text("record '", name, "': ", error.what()));
    }
  }
}

}  // namespace tessera
