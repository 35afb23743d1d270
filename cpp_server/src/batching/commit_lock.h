// Between batches and the commits that change the model's weights in place: every batch is computed
// with one state of them, from its first lookup to its last output, and says with which.
//
// Contract: `commit` is written by who has the lock alone, and read by who has it.
#pragma once

#include <cstdint>

#include "common/reader_writer_lock.h"

namespace tessera {

struct CommitLock {
  ReaderWriterLock lock;
  std::int64_t commit = 0;  // 0: the package itself
};

}  // namespace tessera
