#include "follow/commit_file.h"

#include <map>
#include <utility>

#include "common/text.h"
#include "package/format_rules.h"
#include "package/package_error.h"
#include "package/verify.h"

namespace tessera {
namespace {

// Calls `read`, which throws PackageError where the file is not what it should be.
template <typename Read>
auto damaged_unless(const Read& read) {
  try {
    return read();
  } catch (const UnreadableError& error) {
    throw CommitError("damaged", error.reason(), CommitError::Again::kYes);
  } catch (const PackageError& error) {
    throw CommitError("damaged", error.reason());
  }
}

struct Last {
  CommitInfo info;
  std::string sha256;
};

Last read_last(const Records& records, const std::optional<std::vector<PublicKey>>& trusted) {
  if (!records.has(kCommitRecord)) {
    throw CommitError("damaged", text("has no ", kCommitRecord, ": it is not a commit"));
  }
  const std::vector<std::byte> content =
      damaged_unless([&] { return records.read(kCommitRecord, kMaxCommitJsonBytes); });
  Last last;
  try {
    last.info = parse_commit(content);
    last.sha256 = unsigned_sha256(content);
  } catch (const std::invalid_argument& error) {
    throw CommitError("schema", error.what());
  }
  if (trusted.has_value()) {
    try {
      require_signature(records.file().path(), content, *trusted, "commit",
                        "publish with --sign KEY.pem");
    } catch (const PackageError& error) {
      throw CommitError("unsigned", error.reason());
    }
  }
  return last;
}

Records open_records(const PackageFile& file) {
  if (file.size() > kMaxCommitBytes) {
    throw CommitError("memory", text("has ", file.size(), " bytes, the limit is ", kMaxCommitBytes),
                      CommitError::Again::kYes);
  }
  return damaged_unless([&] { return Records(file, kCommitArchive); });
}

}  // namespace

CommitFile::CommitFile(const std::string& path,
                       const std::optional<std::vector<PublicKey>>& trusted)
    : file_(damaged_unless([&] { return PackageFile(path); })), records_(open_records(file_)) {
  Last last = read_last(records_, trusted);
  info_ = std::move(last.info);
  sha256_ = std::move(last.sha256);
}

ReadCommit CommitFile::read(const Weights& weights, const std::function<void()>& go_on) const {
  ReadCommit commit{.info = info_, .sha256 = sha256_, .golden = {}, .patches = {}};
  std::map<std::string, RawBytes> contents;
  damaged_unless([&] {
    verify_headers(records_, info_.records);
    return 0;
  });
  try {
    for (std::size_t place = 0; place < info_.patches.size(); ++place) {
      check_patch_fits(info_.patches[place], place, weights.bytes(info_.patches[place].record));
    }
  } catch (const std::invalid_argument& error) {
    throw CommitError("schema", error.what());
  }
  try {
    damaged_unless([&] {
      verify_records(records_, info_.records,
                     {.into = [&](const std::string& name, const Record& record) -> Destination {
                        return {.place = contents.emplace(name, record.bytes).first->second};
                      },
                      .progress = [&](std::uint64_t) { go_on(); }});
      return 0;
    });
    for (std::size_t place = 0; place < info_.patches.size(); ++place) {
      const PatchInfo& info = info_.patches[place];
      Patch& patch = commit.patches.emplace_back();
      patch.info = info;
      if (!info.rows.empty()) {
        patch.rows = contents.at(info.rows);  // two patches may share them
        check_rows_fit(info, place, patch.rows, *weights.bytes(info.record));
      }
      patch.bytes = std::move(contents.at(info.bytes));
    }
  } catch (const std::invalid_argument& error) {
    throw CommitError("schema", error.what());
  }
  commit.golden = std::move(contents.at(kCommitGoldenRecord));
  return commit;
}

std::optional<std::string> commit_sha256(const std::string& path) {
  try {
    return CommitFile(path, std::nullopt).sha256();
  } catch (const std::exception&) {
    return std::nullopt;
  }
}

}  // namespace tessera
