// What the new connections of a port encrypt with; those that are there keep what they have.
//
// Contract: any thread; the lock is held for the copy of a pointer.
#pragma once

#include <utility>

#include "common/mutex.h"
#include "http2/tls_session.h"

namespace tessera::http2 {

class ServerTls {
 public:
  explicit ServerTls(TlsContext first) : context_(std::move(first)) {}

  TlsContext current() const {
    const MutexLock lock(mutex_);
    return context_;
  }

  void replace(TlsContext next) {
    const MutexLock lock(mutex_);
    context_.swap(next);
  }

 private:
  mutable Mutex mutex_;
  TlsContext context_ TESSERA_GUARDED_BY(mutex_);
};

}  // namespace tessera::http2
