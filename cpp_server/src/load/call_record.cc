#include "load/call_record.h"

#include <bit>
#include <cstdint>
#include <string>

#include "common/flags.h"

namespace tessera {
namespace {

static_assert(std::endian::native == std::endian::little, "the file is little-endian");

template <typename Number>
void append(std::string& bytes, Number number) {
  bytes.append(reinterpret_cast<const char*>(&number), sizeof number);
}

}  // namespace

CallRecord::CallRecord(const std::string& path)
    : path_(path), file_(path, std::ios::binary | std::ios::trunc) {
  if (!file_) refuse_flag("record", path, "it cannot be written");
}

void CallRecord::add(const CallTag& tag, Duration latency, GrpcCode code, std::string_view answer) {
  using std::chrono::nanoseconds;
  std::string bytes;
  append(bytes, std::int64_t{nanoseconds(tag.intended.time_since_epoch()).count()});
  append(bytes, std::int64_t{nanoseconds(latency).count()});
  append(bytes, static_cast<std::uint32_t>(tag.request));
  append(bytes, static_cast<std::uint32_t>(code));
  append(bytes, static_cast<std::uint32_t>(answer.size()));
  bytes.append(answer);
  const MutexLock lock(mutex_);
  file_.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

void CallRecord::close() {
  const MutexLock lock(mutex_);
  file_.close();
  if (!file_) refuse_flag("record", path_, "it could not be written to its end");
}

}  // namespace tessera
