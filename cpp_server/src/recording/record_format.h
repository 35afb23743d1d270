// Files of recorded requests, byte by byte: docs/replay.md has the table of them, and
// serving/server/observe/record_format.py reads and writes the same ones.
//
// A file is a header and records, one after another, little-endian. Each record has the sum of its
// own bytes, so that a file that was cut anywhere is read up to its last whole record.
//
// Contract: free functions without state; any thread. They may throw std::bad_alloc.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace tessera {

inline constexpr std::size_t kRecordingHeaderBytes = 36;
inline constexpr std::size_t kMostNameBytes = 65'535;  // of a model, a version or a request id

enum class RecordedMethod : std::uint8_t { kPredict = 1, kModelInfer = 2 };
enum class RecordedProtocol : std::uint8_t { kGrpc = 1, kRest = 2 };

struct RecordingHeader {
  std::uint32_t process = 0;       // number of the process that has written the file
  std::int64_t start_unix_ns = 0;  // when its recording began
  double share = 0;                // of the calls that were to be recorded
};

// One recorded call; the views are borrowed.
struct RecordedCall {
  std::uint64_t arrival_ns = 0;  // when its message was there, after the recording's start
  RecordedMethod method = RecordedMethod::kPredict;
  RecordedProtocol protocol = RecordedProtocol::kGrpc;
  std::string_view model;  // that the call went to
  std::string_view version;
  std::string_view request_id;
  std::string_view message;  // of protobuf, as it was received; of REST as the server made it
};

// Whether a file of this name, without its folder, is one of recorded requests.
bool is_recording_name(std::string_view name);

std::string recording_header(const RecordingHeader& header);

// Nothing where `file` does not begin with a header of this version.
std::optional<RecordingHeader> read_recording_header(std::string_view file);

// The record of `call`, whose sum seal_record adds. Empty: a name is longer than kMostNameBytes, or
// the message than 4 GiB.
std::string unsealed_record(const RecordedCall& call);
void seal_record(std::string& record);

// Takes the next record from the beginning of `rest`, which stays as it is where there is no whole
// one. The call's views point into it.
std::optional<RecordedCall> take_record(std::string_view& rest);

}  // namespace tessera
