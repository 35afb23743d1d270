#include "observe/access_log.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstring>
#include <exception>
#include <thread>
#include <utility>

#include "common/flags.h"
#include "common/text.h"
#include "common/thread_name.h"

namespace tessera {
namespace {

constexpr std::string_view kStandardOutput = "-";
constexpr Duration kFlushLimit = std::chrono::seconds(1);
// Lines of so long are written at once.
constexpr Duration kGather = std::chrono::milliseconds(20);
// What one write takes of a file; of a pipe PIPE_BUF, which is taken whole.
constexpr std::size_t kFileChunk = 64 * 1024;
// Lines tell who asked for what: not for everybody.
constexpr mode_t kMode = 0640;

// Throws UsageError.
int opened(const std::string& path) {
  // A pipe that nobody reads is refused rather than waited for.
  const int descriptor =
      path == kStandardOutput
          ? ::fcntl(STDOUT_FILENO, F_DUPFD_CLOEXEC, STDERR_FILENO + 1)
          : ::open(path.c_str(), O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC | O_NOCTTY | O_NONBLOCK,
                   kMode);
  if (descriptor >= 0) return descriptor;
  throw UsageError(text("the access log '", path, "' cannot be opened (", std::strerror(errno),
                        "); give --access-log another path"));
}

std::size_t chunk_of(int descriptor) {
  struct stat about {};
  const bool file = ::fstat(descriptor, &about) == 0 && S_ISREG(about.st_mode);
  return file ? kFileChunk : PIPE_BUF;
}

}  // namespace

struct AccessLog::Target {
  explicit Target(int opened_one) : descriptor(opened_one) {}
  ~Target() { ::close(descriptor); }
  Target(const Target&) = delete;
  Target& operator=(const Target&) = delete;

  const int descriptor;
};

AccessLog::AccessLog(std::string path)
    : path_(std::move(path)), target_(std::make_shared<Target>(opened(path_))) {
  writer_ = std::make_shared<LogWriter>(
      target_->descriptor, [](std::string_view, std::uint64_t) { return std::string(); },
      LogPace{.gather = kGather, .chunk_bytes = chunk_of(target_->descriptor)});
  // Not joined: it may wait for its reader for ever.
  std::thread([target = target_, writer = writer_] {
    name_thread("access-log");
    writer->run();
  }).detach();
}

AccessLog::~AccessLog() {
  flush();
  writer_->close();
}

bool AccessLog::has_file() const { return path_ != kStandardOutput; }

void AccessLog::write(const CallRecord& record) noexcept {
  try {
    writer_->put(access_line(record, std::chrono::system_clock::now()));
  } catch (const std::exception&) {  // no memory for the line
    drop_line();
  }
}

void AccessLog::reopen() {
  const Target fresh(opened(path_));
  // In one step, between two writes of the writing thread.
  ::dup3(fresh.descriptor, target_->descriptor, O_CLOEXEC);
}

void AccessLog::flush() const { writer_->flush(kFlushLimit); }

}  // namespace tessera
