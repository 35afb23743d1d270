// Records a share of the requests to a folder, so that tessera-load --replay can send them again:
// docs/replay.md. serving/server/observe/request_recorder.py writes the same files.
//
// A call copies its message into a bounded queue and goes on; one thread writes what has come in a
// few milliseconds at once. What finds no room, fits into no file or cannot be written is dropped
// and counted; a folder that cannot be written to is tried again after a second, and told to the
// log once a minute at most.
//
// Contract: draws, put, drop and the counts may be called from any thread and do not block; put
// does not throw. The log outlives the recorder.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "common/clock.h"
#include "recording/record_format.h"
#include "recording/record_options.h"
#include "server/log.h"

namespace tessera {

class RequestRecorder {
 public:
  // What waits to be written at most.
  static constexpr std::size_t kMaxRecords = 8'192;
  static constexpr std::size_t kMaxBytes = 32 * 1024 * 1024;

  // Throws UsageError where the folder cannot be written to. No file is begun before there is a
  // request for it.
  RequestRecorder(const RecordOptions& options, const Log& log);
  // Waits as flush does.
  ~RequestRecorder();
  RequestRecorder(const RequestRecorder&) = delete;
  RequestRecorder& operator=(const RequestRecorder&) = delete;

  // Whether the next call is one of the share.
  bool draws() const;

  // Records `call`, which arrived at `arrival` and whose own time is not looked at.
  void put(TimePoint arrival, RecordedCall call) noexcept;

  // There was no memory for a record.
  void drop() noexcept;

  // Waits until what is queued has been written, for a second at most.
  void flush() const;

  std::uint64_t written() const;
  std::uint64_t dropped() const;
  std::uint64_t bytes() const;  // of written records

 private:
  class Writer;

  const double share_;
  const TimePoint start_;
  // Shared with the writing thread, which may wait for its disk for ever.
  std::shared_ptr<Writer> writer_;
};

}  // namespace tessera
