#include "server/record_flags.h"

#include <string>

#include "common/text.h"

namespace tessera {
namespace {

constexpr std::int64_t kLeastFileBytes = 4'096;
constexpr std::int64_t kMostBytes = std::int64_t{1} << 50;

}  // namespace

std::vector<Flag> record_flags(ServerConfig& config) {
  RecordOptions& record = config.observer.record;
  return {
      {"record", "DIR",
       "a folder that gets a share of the requests for scores, as they were received, so that "
       "tessera-load --replay can send them again; made where there is none, for its owner alone, "
       "docs/replay.md (default: none, nothing is recorded)",
       [&](const std::string& value) { record.folder = value; }},
      {"record-share", "SHARE",
       text("with --record, the share of the calls that are recorded, 0 to 1 (default: ",
            record.share, ")"),
       [&](const std::string& value) {
         const auto share = parse_number<double>("record-share", value);
         // Written so that a NaN is refused.
         if (!(share >= 0 && share <= 1)) {
           refuse_flag("record-share", value, "give a share from 0 to 1");
         }
         record.share = share;
       }},
      number_flag("record-file-bytes",
                  "with --record, what one of its files may have, bytes; then the next is begun",
                  record.file_bytes, kLeastFileBytes, kMostBytes),
      number_flag("record-bytes",
                  "with --record, what the folder's files may have in sum, bytes; the oldest are "
                  "removed",
                  record.folder_bytes, kLeastFileBytes, kMostBytes),
  };
}

void check_recording(const ServerConfig& config) {
  const RecordOptions& record = config.observer.record;
  if (record.folder_bytes < record.file_bytes) {
    refuse_flag("record-bytes", text(record.folder_bytes),
                text("a file of --record-file-bytes ", record.file_bytes,
                     " could never be in it: raise the one or lower the other"));
  }
}

}  // namespace tessera
