#include "load/replay.h"

#include <algorithm>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <utility>

#include "common/flags.h"
#include "recording/record_format.h"

namespace tessera {
namespace {

struct Call {
  std::int64_t at_unix_ns = 0;
  RecordedMethod method = RecordedMethod::kPredict;
  std::string message;
};

std::vector<std::string> files_of(const std::string& path) {
  std::error_code trouble;
  if (!std::filesystem::is_directory(path, trouble)) return {path};
  std::vector<std::string> files;
  std::filesystem::directory_iterator entries(path, trouble);
  for (; !trouble && entries != std::filesystem::directory_iterator(); entries.increment(trouble)) {
    if (is_recording_name(entries->path().filename().string())) files.push_back(entries->path());
  }
  if (trouble) refuse_flag("replay", path, "it cannot be read");
  if (files.empty()) refuse_flag("replay", path, "it has no file of recorded requests");
  std::sort(files.begin(), files.end());
  return files;
}

// Adds the calls of a file; whether it ends with its last record.
bool read_file(const std::string& path, std::vector<Call>& calls) {
  std::ifstream file(path, std::ios::binary);
  const std::string content((std::istreambuf_iterator<char>(file)), {});
  if (!file) refuse_flag("replay", path, "it cannot be read");
  const auto header = read_recording_header(content);
  if (!header.has_value()) {
    refuse_flag("replay", path, "it does not begin as a file of recorded requests of version 1");
  }
  std::string_view rest = std::string_view(content).substr(kRecordingHeaderBytes);
  while (const auto call = take_record(rest)) {
    calls.push_back({header->start_unix_ns + static_cast<std::int64_t>(call->arrival_ns),
                     call->method, std::string(call->message)});
  }
  return rest.empty();
}

}  // namespace

Recording read_recording(const std::string& path) {
  Recording recording;
  std::vector<Call> calls;
  for (const std::string& file : files_of(path)) {
    if (!read_file(file, calls)) ++recording.cut_files;
  }
  if (calls.empty()) refuse_flag("replay", path, "it has no whole request");
  std::stable_sort(calls.begin(), calls.end(),
                   [](const Call& a, const Call& b) { return a.at_unix_ns < b.at_unix_ns; });
  const std::int64_t first = calls.front().at_unix_ns;
  recording.messages.reserve(calls.size());
  recording.methods.reserve(calls.size());
  recording.at.reserve(calls.size());
  for (Call& call : calls) {
    recording.messages.push_back(std::move(call.message));
    recording.methods.push_back(call.method == RecordedMethod::kPredict
                                    ? "/predictor.Predictor/Predict"
                                    : "/inference.GRPCInferenceService/ModelInfer");
    recording.at.emplace_back(call.at_unix_ns - first);
  }
  return recording;
}

}  // namespace tessera
