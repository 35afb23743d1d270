#include "common/reader_writer_lock.h"

#include <algorithm>

namespace tessera {

bool ReaderWriterLock::anybody() const {
  return std::any_of(readers_.begin(), readers_.end(),
                     [](const ThreadSlot& slot) { return slot.count.load() != 0; });
}

void ReaderWriterLock::lock() {
  const MutexLock lock(mutex_);
  while (alone_) changed_.wait(mutex_);  // another one has it
  alone_ = true;
  while (anybody()) changed_.wait(mutex_);
}

void ReaderWriterLock::unlock() {
  const MutexLock lock(mutex_);
  alone_ = false;
  changed_.notify_all();
}

void ReaderWriterLock::wait_for_writer() {
  const MutexLock lock(mutex_);
  while (alone_) changed_.wait(mutex_);
}

void ReaderWriterLock::tell() {
  const MutexLock lock(mutex_);
  changed_.notify_all();
}

}  // namespace tessera
