#include "recording/request_recorder.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <deque>
#include <exception>
#include <string>
#include <thread>
#include <utility>

#include "common/mutex.h"
#include "common/thread_name.h"
#include "observe/request_ids.h"
#include "recording/record_files.h"

namespace tessera {
namespace {

constexpr Duration kFlushLimit = std::chrono::seconds(1);
// Records of so long are written at once.
constexpr Duration kGather = std::chrono::milliseconds(20);
constexpr std::size_t kChunkBytes = 256 * 1024;
// A folder that could not be written to is left alone for so long, and told of so seldom.
constexpr Duration kPause = std::chrono::seconds(1);
constexpr Duration kSilence = std::chrono::seconds(60);

RecordingHeader header_of(const RecordOptions& options) {
  using std::chrono::nanoseconds;
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return {.process = static_cast<std::uint32_t>(::getpid()),
          .start_unix_ns = std::chrono::duration_cast<nanoseconds>(now).count(),
          .share = options.share};
}

}  // namespace

class RequestRecorder::Writer {
 public:
  Writer(const RecordOptions& options, const Log& log)
      : files_(options, header_of(options)), log_(&log) {}

  void put(std::string record) noexcept {
    bool queued = false;
    bool wake = false;
    try {
      const MutexLock lock(mutex_);
      if (!closed_ && queue_.size() < kMaxRecords && record.size() <= kMaxBytes - held_) {
        held_ += record.size();
        queue_.push_back(std::move(record));
        queued = true;
        wake = std::exchange(waiting_, false) || held_ > kMaxBytes / 2;
      }
    } catch (const std::exception&) {  // the queue's own memory is not to be had
      drop(1);
      return;
    }
    if (wake) changed_.notify_one();
    if (!queued) drop(1);
  }

  void drop(std::uint64_t records) noexcept {
    dropped_.fetch_add(records, std::memory_order_relaxed);
  }

  void flush() {
    const TimePoint until = std::chrono::steady_clock::now() + kFlushLimit;
    const MutexLock lock(mutex_);
    ++flushes_;
    changed_.notify_one();
    while (held_ > 0 && std::chrono::steady_clock::now() < until) idle_.wait_until(mutex_, until);
    --flushes_;
  }

  // Nothing is told to the log from now on, which may end.
  void close() {
    const MutexLock lock(mutex_);
    closed_ = true;
    log_ = nullptr;
    changed_.notify_one();
  }

  void run() noexcept {
    std::deque<std::string> taken;
    while (take(taken)) {
      std::size_t bytes = 0;
      for (const std::string& record : taken) bytes += record.size();
      write(taken);
      taken.clear();
      const MutexLock lock(mutex_);
      held_ -= bytes;
      if (held_ == 0) idle_.notify_all();
    }
  }

  std::uint64_t written() const { return written_.load(std::memory_order_relaxed); }
  std::uint64_t dropped() const { return dropped_.load(std::memory_order_relaxed); }
  std::uint64_t bytes() const { return bytes_.load(std::memory_order_relaxed); }

 private:
  // Waits for records and takes them all; false: there will be none any more.
  bool take(std::deque<std::string>& taken) {
    const MutexLock lock(mutex_);
    while (queue_.empty()) {
      if (closed_) return false;
      waiting_ = true;
      changed_.wait(mutex_);
      waiting_ = false;
    }
    const TimePoint until = std::chrono::steady_clock::now() + kGather;
    while (!closed_ && flushes_ == 0 && held_ <= kMaxBytes / 2 &&
           std::chrono::steady_clock::now() < until) {
      changed_.wait_until(mutex_, until);
    }
    taken.swap(queue_);
    return true;
  }

  void write(std::deque<std::string>& records) noexcept {
    const std::size_t most = std::min(kChunkBytes, files_.room());
    chunk_.clear();
    std::uint64_t count = 0;
    for (std::string& record : records) {
      seal_record(record);
      if (record.size() > files_.room()) {
        drop(1);
        continue;
      }
      if (count > 0 && chunk_.size() + record.size() > most) {
        write_chunk(std::exchange(count, 0));
      }
      try {
        chunk_ += record;
        ++count;
      } catch (const std::exception&) {  // no memory for a large one
        drop(1);
      }
    }
    if (count > 0) write_chunk(count);
  }

  void write_chunk(std::uint64_t records) noexcept {
    const TimePoint now = std::chrono::steady_clock::now();
    if (now < retry_at_) {
      drop(records);
    } else {
      try {
        files_.write(chunk_);
        written_.fetch_add(records, std::memory_order_relaxed);
        bytes_.fetch_add(chunk_.size(), std::memory_order_relaxed);
        if (std::exchange(failing_, false)) tell_again();
      } catch (const std::exception& error) {
        drop(records);
        retry_at_ = now + kPause;
        failing_ = true;
        tell_failure(now, error.what());
      }
    }
    chunk_.clear();
  }

  void tell_failure(TimePoint now, const char* why) noexcept {
    if (now < silent_until_) return;
    silent_until_ = now + kSilence;
    const MutexLock lock(mutex_);
    if (log_ != nullptr) log_->warning("records_not_written", {{"error", std::string(why)}});
  }

  void tell_again() noexcept {
    const MutexLock lock(mutex_);
    if (log_ != nullptr) log_->info("records_written_again");
  }

  // The writing thread's.
  RecordFiles files_;
  std::string chunk_;
  bool failing_ = false;
  TimePoint retry_at_ = TimePoint::min();
  TimePoint silent_until_ = TimePoint::min();

  std::atomic<std::uint64_t> written_ = 0;
  std::atomic<std::uint64_t> dropped_ = 0;
  std::atomic<std::uint64_t> bytes_ = 0;
  Mutex mutex_;
  Condition changed_;  // for the writing thread
  Condition idle_;     // for flush
  std::deque<std::string> queue_ TESSERA_GUARDED_BY(mutex_);
  std::size_t held_ TESSERA_GUARDED_BY(mutex_) = 0;  // of records that are not written yet
  bool waiting_ TESSERA_GUARDED_BY(mutex_) = false;
  int flushes_ TESSERA_GUARDED_BY(mutex_) = 0;
  bool closed_ TESSERA_GUARDED_BY(mutex_) = false;
  const Log* log_ TESSERA_GUARDED_BY(mutex_);
};

RequestRecorder::RequestRecorder(const RecordOptions& options, const Log& log)
    : share_(options.share), start_(std::chrono::steady_clock::now()) {
  check_record_folder(options.folder);
  writer_ = std::make_shared<Writer>(options, log);
  std::thread([writer = writer_] {
    name_thread("recorder");
    writer->run();
  }).detach();
}

RequestRecorder::~RequestRecorder() {
  flush();
  writer_->close();
}

bool RequestRecorder::draws() const {
  return share_ >= 1 || (share_ > 0 && random_share() < share_);
}

void RequestRecorder::put(TimePoint arrival, RecordedCall call) noexcept {
  try {
    call.arrival_ns =
        static_cast<std::uint64_t>(std::max(Duration::zero(), Duration(arrival - start_)).count());
    std::string record = unsealed_record(call);
    if (record.empty()) {
      drop();
    } else {
      writer_->put(std::move(record));
    }
  } catch (const std::exception&) {  // no memory for the record
    drop();
  }
}

void RequestRecorder::drop() noexcept { writer_->drop(1); }

void RequestRecorder::flush() const { writer_->flush(); }

std::uint64_t RequestRecorder::written() const { return writer_->written(); }
std::uint64_t RequestRecorder::dropped() const { return writer_->dropped(); }
std::uint64_t RequestRecorder::bytes() const { return writer_->bytes(); }

}  // namespace tessera
