// Files of recorded requests: their bytes, where they are cut, their bounds, and disks that fail.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "common/flags.h"
#include "recording/record_files.h"
#include "recording/record_format.h"
#include "recording/request_recorder.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

// A folder that goes with its test.
struct RecordFolder {
  RecordFolder() {
    std::string name = testing::TempDir() + "record-XXXXXX";
    EXPECT_NE(::mkdtemp(name.data()), nullptr);
    path = name;
  }
  ~RecordFolder() { fs::remove_all(path); }
  RecordFolder(const RecordFolder&) = delete;
  RecordFolder& operator=(const RecordFolder&) = delete;

  std::vector<fs::path> files() const {
    std::vector<fs::path> found;
    for (const auto& entry : fs::directory_iterator(path)) found.push_back(entry.path());
    std::sort(found.begin(), found.end());
    return found;
  }

  fs::path path;
};

std::string content_of(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

RecordedCall call_of(std::string_view message) {
  return {.arrival_ns = 258,
          .method = RecordedMethod::kModelInfer,
          .protocol = RecordedProtocol::kRest,
          .model = "ranker",
          .version = "3",
          .request_id = "an id",
          .message = message};
}

std::string record_of(std::string_view message) {
  std::string record = unsealed_record(call_of(message));
  seal_record(record);
  return record;
}

std::size_t records_in(std::string_view file) {
  EXPECT_TRUE(read_recording_header(file).has_value());
  std::string_view rest = file.substr(kRecordingHeaderBytes);
  std::size_t count = 0;
  while (take_record(rest)) ++count;
  return count;
}

std::string hexadecimal(std::string_view bytes) {
  std::string digits;
  for (const char byte : bytes) {
    for (const unsigned shift : {4U, 0U}) {
      digits += "0123456789abcdef"[static_cast<unsigned char>(byte) >> shift & 0xfU];
    }
  }
  return digits;
}

TEST(RecordFormatTest, EveryByteIsDetermined) {
  // tests/server/test_request_recorder.py expects the same bytes.
  EXPECT_EQ(hexadecimal(recording_header({.process = 7, .start_unix_ns = 1'000, .share = 0.5})),
            "544553535245430a0100000007000000e803000000000000000000000000e03fdade4f9e");
  EXPECT_EQ(hexadecimal(record_of("message")),
            "23000000e966e53802010000000000000202060001000500"
            "72616e6b657233616e2069646d657373616765");
}

TEST(RecordFormatTest, AFileThatIsCutAnywhereIsReadUpToItsLastWholeRecord) {
  const std::string file = recording_header({}) + record_of("first") + record_of("second");
  const std::size_t first_end = kRecordingHeaderBytes + record_of("first").size();
  for (std::size_t size = 0; size <= file.size(); ++size) {
    const std::string_view cut = std::string_view(file).substr(0, size);
    if (size < kRecordingHeaderBytes) {
      EXPECT_FALSE(read_recording_header(cut).has_value());
    } else {
      EXPECT_EQ(records_in(cut), size < first_end ? 0U : size < file.size() ? 1U : 2U);
    }
  }
  for (std::size_t at = 0; at < file.size(); ++at) {
    std::string changed = file;
    changed[at] = static_cast<char>(changed[at] ^ 1);
    if (at < kRecordingHeaderBytes) {
      EXPECT_FALSE(read_recording_header(changed).has_value()) << at;
    } else {
      EXPECT_EQ(records_in(changed), at < first_end ? 0U : 1U) << at;
    }
  }
}

TEST(RecordFilesTest, TheFolderKeepsToItsBound) {
  const RecordFolder folder;
  const RecordOptions options{
      .folder = folder.path.string(), .file_bytes = 4'096, .folder_bytes = 12'288};
  RecordFiles files(options, {});
  RecordFiles others(options, {.process = 9});
  others.write(record_of("of another process"));
  const fs::path kept = folder.files().at(0);
  const std::string record = record_of(std::string(1'000, 'x'));
  for (int i = 0; i < 50; ++i) {
    files.write(record);
    std::uintmax_t sum = 0;
    for (const fs::path& file : folder.files()) {
      sum += fs::file_size(file);
      EXPECT_LE(fs::file_size(file), 4'096U);
      EXPECT_GT(records_in(content_of(file)), 0U);
    }
    EXPECT_LE(sum, 12'288U);
  }
  EXPECT_EQ(folder.files().size(), 3U);
  EXPECT_EQ(folder.files().at(0), kept);
  struct stat about {};
  ASSERT_EQ(::stat(kept.c_str(), &about), 0);
  EXPECT_EQ(about.st_mode & 0777U, 0600U);
  // Files that are being written to are not removed.
  RecordFiles third(options, {.process = 10});
  third.write(record);
  RecordFiles fourth(options, {.process = 11});
  EXPECT_THROW(fourth.write(record), RecordError);
}

TEST(RecordFilesTest, WhatADiskDoesNotTakeLeavesNoPart) {
  const RecordFolder folder;
  RecordFiles files({.folder = folder.path.string()}, {});
  files.write(record_of("first"));
  const std::string before = content_of(folder.files().at(0));
  rlimit limit{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &limit), 0);
  auto* const handler = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit small{before.size() + 10, limit.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  EXPECT_THROW(files.write(record_of("second")), RecordError);
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
  std::signal(SIGXFSZ, handler);
  EXPECT_EQ(content_of(folder.files().at(0)), before);
  files.write(record_of("third"));
  EXPECT_EQ(folder.files().size(), 2U);
}

TEST(RequestRecorderTest, WhatIsPutIsWrittenOrCounted) {
  const RecordFolder folder;
  const Log log(LogLevel::kError, true);
  const RecordOptions options{.folder = (folder.path / "new").string(), .share = 1};
  const std::string large(static_cast<std::size_t>(options.file_bytes), 'x');
  RequestRecorder recorder(options, log);
  EXPECT_TRUE(recorder.draws());
  for (int i = 0; i < 10; ++i) recorder.put(std::chrono::steady_clock::now(), call_of("message"));
  recorder.put({}, call_of(large));
  recorder.flush();
  EXPECT_EQ(recorder.written(), 10U);
  EXPECT_EQ(recorder.bytes(), 10 * record_of("message").size());
  EXPECT_EQ(recorder.dropped(), 1U);
  fs::remove_all(folder.path / "new");
  recorder.put({}, call_of("message"));
  recorder.flush();
  EXPECT_EQ(recorder.dropped(), 2U);
}

TEST(RequestRecorderTest, AShareOfNothingDrawsNothing) {
  const RecordFolder folder;
  const Log log(LogLevel::kError, true);
  const RequestRecorder none({.folder = folder.path.string(), .share = 0}, log);
  const RequestRecorder half({.folder = folder.path.string(), .share = 0.5}, log);
  int drawn = 0;
  for (int i = 0; i < 10'000; ++i) {
    EXPECT_FALSE(none.draws());
    drawn += half.draws() ? 1 : 0;
  }
  EXPECT_NEAR(drawn, 5'000, 500);  // ten standard deviations
  EXPECT_TRUE(folder.files().empty());
}

TEST(RequestRecorderTest, AFolderThatCannotBeWrittenToIsRefused) {
  const RecordFolder folder;
  std::ofstream(folder.path / "file") << "x";
  const Log log(LogLevel::kError, true);
  for (const char* name : {"file", "no/folder"}) {
    const RecordOptions options{.folder = (folder.path / name).string()};
    EXPECT_THROW(RequestRecorder(options, log), UsageError) << name;
  }
}

}  // namespace
}  // namespace tessera
