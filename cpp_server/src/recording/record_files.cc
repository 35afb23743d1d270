#include "recording/record_files.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <utility>
#include <vector>

#include "common/flags.h"
#include "common/text.h"

namespace tessera {
namespace {

// Requests hold what is known of users: for nobody else.
constexpr mode_t kFileMode = 0600;
constexpr mode_t kFolderMode = 0700;
constexpr int kNameTries = 1'000;

struct Descriptor {
  explicit Descriptor(int opened) : number(opened) {}
  ~Descriptor() {
    if (number >= 0) ::close(number);
  }
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;

  const int number;
};

struct Found {
  std::string name;
  std::int64_t size = 0;
  bool written = false;  // somebody writes to it
};

[[noreturn]] void fail(const std::string& what) {
  throw RecordError(text(what, ": ", std::strerror(errno)));
}

// The folder's files, the oldest first: names begin with the time.
std::vector<Found> files_of(int folder, const std::string& path) {
  std::vector<Found> files;
  std::error_code trouble;
  std::filesystem::directory_iterator entries(path, trouble);
  for (; !trouble && entries != std::filesystem::directory_iterator(); entries.increment(trouble)) {
    Found file{.name = entries->path().filename().string()};
    if (!is_recording_name(file.name)) continue;
    const Descriptor opened(
        ::openat(folder, file.name.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK));
    struct stat about {};
    if (opened.number < 0 || ::fstat(opened.number, &about) != 0 || !S_ISREG(about.st_mode)) {
      continue;
    }
    file.size = about.st_size;
    file.written = ::flock(opened.number, LOCK_EX | LOCK_NB) != 0;
    files.push_back(std::move(file));
  }
  if (trouble) throw RecordError(text("the folder cannot be read: ", trouble.message()));
  std::sort(files.begin(), files.end(),
            [](const Found& a, const Found& b) { return a.name < b.name; });
  return files;
}

}  // namespace

void check_record_folder(const std::string& folder) {
  // One that is there already is as good.
  const bool made = ::mkdir(folder.c_str(), kFolderMode) == 0 || errno == EEXIST;
  struct stat about {};
  if (made && ::stat(folder.c_str(), &about) == 0) {
    if (!S_ISDIR(about.st_mode)) {
      errno = ENOTDIR;
    } else if (::access(folder.c_str(), R_OK | W_OK | X_OK) == 0) {
      return;
    }
  }
  throw UsageError(text("the folder of recorded requests '", folder, "' cannot be written to (",
                        std::strerror(errno), "); give --record another folder"));
}

RecordFiles::RecordFiles(RecordOptions options, RecordingHeader header)
    : options_(std::move(options)), header_(header) {}

RecordFiles::~RecordFiles() { close(); }

std::size_t RecordFiles::room() const {
  return static_cast<std::size_t>(options_.file_bytes) - kRecordingHeaderBytes;
}

void RecordFiles::write(std::string_view records) {
  const auto bytes = static_cast<std::int64_t>(records.size());
  if (file_ < 0 || size_ + bytes > options_.file_bytes || is_gone()) open_next();
  append(records);
}

// Whether somebody has removed the file.
bool RecordFiles::is_gone() const {
  struct stat about {};
  return ::fstat(file_, &about) != 0 || about.st_nlink == 0;
}

void RecordFiles::close() {
  if (file_ >= 0) ::close(std::exchange(file_, -1));
}

void RecordFiles::append(std::string_view bytes) {
  std::string_view rest = bytes;
  while (!rest.empty()) {
    const ssize_t count = ::write(file_, rest.data(), rest.size());
    if (count >= 0) {
      rest.remove_prefix(static_cast<std::size_t>(count));
    } else if (errno != EINTR) {
      const int why = errno;
      // The part that was written goes: readers would stop there.
      if (::ftruncate(file_, size_) != 0) errno = why;
      close();
      errno = why;
      fail("a file cannot be written to");
    }
  }
  size_ += static_cast<std::int64_t>(bytes.size());
}

void RecordFiles::open_next() {
  close();
  const Descriptor folder(::open(options_.folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (folder.number < 0) fail("the folder cannot be opened");
  // One process after the other. Some file systems have no lock for folders; then the bound holds
  // for each of them alone.
  static_cast<void>(::flock(folder.number, LOCK_EX));
  make_room(folder.number);
  begin_file(folder.number);
}

void RecordFiles::make_room(int folder) const {
  std::vector<Found> files = files_of(folder, options_.folder);
  std::int64_t held = options_.file_bytes;  // the new one's
  for (Found& file : files) {
    if (file.written) file.size = std::max(file.size, options_.file_bytes);
    held += file.size;
  }
  for (const Found& file : files) {
    if (held <= options_.folder_bytes) return;
    if (file.written) continue;
    if (::unlinkat(folder, file.name.c_str(), 0) != 0) fail("an old file cannot be removed");
    held -= file.size;
  }
  if (held > options_.folder_bytes) {
    throw RecordError(text("files that others write to leave no room in ", options_.folder_bytes,
                           " bytes, the bound of --record-bytes"));
  }
}

void RecordFiles::begin_file(int folder) {
  auto micros = std::chrono::duration_cast<std::chrono::microseconds>(
                    std::chrono::system_clock::now().time_since_epoch())
                    .count();
  for (int i = 0; i < kNameTries && file_ < 0; ++i, ++micros) {
    std::string number = std::to_string(micros);
    constexpr std::size_t kDigits = 16;
    number.insert(0, kDigits - std::min(kDigits, number.size()), '0');
    const std::string name = text("requests-", number, "-", header_.process, ".rec");
    file_ = ::openat(folder, name.c_str(),
                     O_WRONLY | O_APPEND | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, kFileMode);
    if (file_ < 0 && errno != EEXIST) break;
  }
  if (file_ < 0) fail("a file cannot be made");
  static_cast<void>(::flock(file_, LOCK_EX | LOCK_NB));
  size_ = 0;
  append(recording_header(header_));
}

}  // namespace tessera
