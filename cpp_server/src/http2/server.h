// A gRPC server's connections: who listens, the loops that connections live on, and their end.
//
// A new connection goes to the loop with the fewest. Where there are as many as may be, new ones
// wait in the system's queue; where the system has no descriptor for one more, it is accepted with
// a spare one and closed at once. Meanwhile connections without a call are closed sooner
// (Counters::full_of_connections).
//
// Contract: one thread calls start, stop and release, once each and in this order; announce_end may
// be called by any thread in between. The methods are added before start. A method belongs to one
// loop and is used by its thread alone. What posts to a loop has ended before release.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "common/clock.h"
#include "http2/call_gate.h"
#include "http2/event_loop.h"
#include "http2/limits.h"
#include "http2/method_table.h"
#include "http2/server_tls.h"

namespace tessera::http2 {

class Server {
 public:
  // `counters`, `gate` (null: every call may be heard) and `tls` (null: connections are not
  // encrypted) outlive the server.
  Server(const Limits& limits, Counters& counters, int loops, CallGate* gate = nullptr,
         const ServerTls* tls = nullptr);
  ~Server();
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  std::size_t loops() const { return threads_.size(); }
  EventLoop& loop(std::size_t index);
  MethodTable& methods(std::size_t index);
  Counters& counters() { return counters_; }

  // Accepts connections of `descriptors`, non-blocking sockets that listen and stay the caller's.
  void start(const std::vector<int>& descriptors);

  // Asks every client to begin its further calls elsewhere.
  void announce_end();

  // Accepts no more, and lets every connection end with its last answer; waits for them, but not
  // beyond `until`.
  void stop(TimePoint until);

  // Ends the loops, and what is left of the connections.
  void release();

 private:
  class Thread;
  class Listener;

  const Limits limits_;
  Counters& counters_;
  std::vector<std::unique_ptr<Thread>> threads_;
  std::vector<std::unique_ptr<Listener>> listeners_;
};

}  // namespace tessera::http2
