// grpc.health.v1.Health. gRPC's own implementation says SERVING of the server as a whole from the
// moment that the port is open until it is told otherwise; here everything begins NOT_SERVING.
//
// Contract: set may be called from any thread and does not block; it takes effect before it
// returns, and watches hear of it. close ends every watch, so that none holds a shutdown up, when
// it has been told the last state, and every later one as well; it waits for the clients of those
// that there are, but not beyond `until`. The service outlives the gRPC server it is registered
// with. Compiled against gRPC alone.
#pragma once

#include <grpcpp/grpcpp.h>

#include <map>
#include <set>
#include <string>
#include <vector>

#include "common/mutex.h"
#include "health.grpc.pb.h"

namespace tessera {

class HealthService final : public grpc::health::v1::Health::CallbackService {
 public:
  // Besides `names` there is the empty one.
  explicit HealthService(const std::vector<std::string>& names);

  void set(const std::string& name, bool serving);
  void close(TimePoint until);

 private:
  class Watcher;
  using Request = grpc::health::v1::HealthCheckRequest;
  using Response = grpc::health::v1::HealthCheckResponse;

  grpc::ServerUnaryReactor* Check(grpc::CallbackServerContext* context, const Request* request,
                                  Response* response) override;
  grpc::ServerWriteReactor<Response>* Watch(grpc::CallbackServerContext* context,
                                            const Request* request) override;
  Response::ServingStatus status_of(const std::string& name) const TESSERA_REQUIRES(mutex_);

  Mutex mutex_;
  std::map<std::string, bool> serving_ TESSERA_GUARDED_BY(mutex_);
  std::set<Watcher*> watchers_ TESSERA_GUARDED_BY(mutex_);
  Condition nobody_watches_;
  bool closed_ TESSERA_GUARDED_BY(mutex_) = false;
};

}  // namespace tessera
