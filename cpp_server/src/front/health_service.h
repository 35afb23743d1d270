// grpc.health.v1.Health: what is served, to be asked and to be watched. Everything begins
// NOT_SERVING.
//
// Contract: set and close may be called from any thread and do not block; set takes effect before
// it returns, and watches hear of the last state soon. close ends every watch, and every later one,
// once it has been told the last state. add_to is called before the loop runs, once for each loop;
// the service outlives the methods, and is destroyed when no loop runs any more. Compiled against
// protobuf alone.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "common/mutex.h"
#include "front/message_method.h"
#include "health.pb.h"
#include "http2/method_table.h"

namespace tessera {

class HealthService {
 public:
  // Besides `names` there is the empty one.
  explicit HealthService(const std::vector<std::string>& names);
  ~HealthService();

  void add_to(http2::EventLoop& loop, http2::MethodTable& table);

  void set(const std::string& name, bool serving);
  // There is no model `name` any more; watches hear so.
  void forget(const std::string& name);
  void close();

 private:
  class Watches;  // those of one loop
  class Watch;
  class WatchMethod;
  using Request = grpc::health::v1::HealthCheckRequest;
  using Response = grpc::health::v1::HealthCheckResponse;

  Response::ServingStatus status_of(const std::string& name) const;
  bool closed() const;
  void tell_all();

  mutable Mutex mutex_;
  std::map<std::string, bool> serving_ TESSERA_GUARDED_BY(mutex_);
  bool closed_ TESSERA_GUARDED_BY(mutex_) = false;
  std::vector<std::unique_ptr<Watches>> watches_;
};

}  // namespace tessera
