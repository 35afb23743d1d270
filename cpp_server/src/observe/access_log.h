// The access log: one JSON line for each call that tessera_requests_total counts. docs/observe.md
// has the fields; serving/server/observe/access_log.py writes the same ones.
//
// A line is made by whoever ends the call and waits in a bounded queue; a thread of the log's own
// writes what has come in a few milliseconds at once, so that a call costs no system call. What
// finds no room or cannot be written is dropped and counted.
//
// Contract: write and dropped_lines may be called from any thread, and neither blocks nor throws.
// reopen belongs to one thread. SIGPIPE must be ignored (signals.h does that).
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "observe/call_record.h"
#include "server/log_writer.h"

namespace tessera {

class AccessLog {
 public:
  // Appends to the file `path`, which is made where there is none; "-": to the standard output.
  // Throws UsageError where it cannot be opened.
  explicit AccessLog(std::string path);
  // Waits for what is queued, for a second at most.
  ~AccessLog();
  AccessLog(const AccessLog&) = delete;
  AccessLog& operator=(const AccessLog&) = delete;

  void write(const CallRecord& record) noexcept;

  // A line that could not even be made.
  void drop_line() noexcept { writer_->drop_line(); }

  // Whether there is a file that can be opened again.
  bool has_file() const;

  // Lines go to the file that has the path now: what was written to has perhaps been renamed.
  // Throws UsageError where there can be none; lines go on to where they went.
  void reopen();

  // Waits until what is queued has been written, for a second at most.
  void flush() const;

  std::uint64_t dropped_lines() const { return writer_->dropped_lines(); }

 private:
  // A descriptor that is closed when nobody writes to it any more.
  struct Target;

  const std::string path_;
  std::shared_ptr<Target> target_;
  // Shared with the writing thread, which may outlive this object.
  std::shared_ptr<LogWriter> writer_;
};

// The line of `record`, with its newline, of a call that ended at `now`.
std::string access_line(const CallRecord& record, std::chrono::system_clock::time_point now);

}  // namespace tessera
