// A file with each measured call, for programs that look at every answer themselves.
//
// One call after another, little-endian: when it was due (8 bytes, nanoseconds of CLOCK_MONOTONIC),
// how long it took (8 bytes, nanoseconds), the number of its request (4 bytes), its status (4
// bytes), the size of its answer (4 bytes) and the answer.
//
// Contract: any thread may add; close is called once, when nobody adds any more.
#pragma once

#include <cstddef>
#include <fstream>
#include <string>
#include <string_view>

#include "common/clock.h"
#include "common/mutex.h"
#include "load/grpc_channel.h"

namespace tessera {

class CallRecord {
 public:
  // Throws UsageError where the file cannot be written.
  explicit CallRecord(const std::string& path);

  void add(const CallTag& tag, Duration latency, GrpcCode code, std::string_view answer);

  // Throws UsageError where something could not be written.
  void close();

 private:
  const std::string path_;
  Mutex mutex_;
  std::ofstream file_ TESSERA_GUARDED_BY(mutex_);
};

}  // namespace tessera
