#include "front/health_service.h"

#include <utility>

namespace tessera {

// One Watch call. gRPC calls its methods from threads of its own, and never from within StartWrite
// or Finish, so that the service's mutex may be held over those.
class HealthService::Watcher final : public grpc::ServerWriteReactor<Response> {
 public:
  Watcher(HealthService& service, std::string name) : service_(service), name_(std::move(name)) {}

  // The service's mutex is held for the next three. Only the analysis does not know that a
  // watcher's service is the one that calls it.
  void tell() {
    service_.mutex_.assert_held();
    if (writing_ || finished_) return;
    const Response::ServingStatus now = service_.status_of(name_);
    if (told_ && response_.status() == now) {
      if (ending_) finish(grpc::Status::OK);
      return;
    }
    told_ = true;
    writing_ = true;
    response_.set_status(now);
    StartWrite(&response_);
  }

  // Finishes once the last state has been told.
  void end() {
    service_.mutex_.assert_held();
    ending_ = true;
    tell();
  }

  void finish(const grpc::Status& status) {
    service_.mutex_.assert_held();
    if (finished_) return;
    finished_ = true;
    Finish(status);
  }

 private:
  void OnWriteDone(bool ok) override {
    const MutexLock lock(service_.mutex_);
    writing_ = false;
    if (ok) {
      tell();  // what changed meanwhile
    } else {
      finish(grpc::Status::CANCELLED);
    }
  }

  void OnCancel() override {
    const MutexLock lock(service_.mutex_);
    finish(grpc::Status::CANCELLED);
  }

  void OnDone() override {
    {
      const MutexLock lock(service_.mutex_);
      service_.watchers_.erase(this);
      if (service_.watchers_.empty()) service_.nobody_watches_.notify_all();
    }
    delete this;
  }

  HealthService& service_;
  const std::string name_;
  Response response_;
  bool told_ TESSERA_GUARDED_BY(service_.mutex_) = false;
  bool writing_ TESSERA_GUARDED_BY(service_.mutex_) = false;
  bool ending_ TESSERA_GUARDED_BY(service_.mutex_) = false;
  bool finished_ TESSERA_GUARDED_BY(service_.mutex_) = false;
};

HealthService::HealthService(const std::vector<std::string>& names) {
  const MutexLock lock(mutex_);
  serving_[""] = false;
  for (const std::string& name : names) serving_[name] = false;
}

void HealthService::set(const std::string& name, bool serving) {
  const MutexLock lock(mutex_);
  serving_[name] = serving;
  for (Watcher* watcher : watchers_) watcher->tell();
}

void HealthService::close(TimePoint until) {
  const MutexLock lock(mutex_);
  closed_ = true;
  for (Watcher* watcher : watchers_) watcher->end();
  while (!watchers_.empty() && std::chrono::steady_clock::now() < until) {
    nobody_watches_.wait_until(mutex_, until);
  }
}

HealthService::Response::ServingStatus HealthService::status_of(const std::string& name) const {
  const auto found = serving_.find(name);
  if (found == serving_.end()) return Response::SERVICE_UNKNOWN;
  return found->second ? Response::SERVING : Response::NOT_SERVING;
}

grpc::ServerUnaryReactor* HealthService::Check(grpc::CallbackServerContext* context,
                                               const Request* request, Response* response) {
  grpc::ServerUnaryReactor* const reactor = context->DefaultReactor();
  {
    const MutexLock lock(mutex_);
    response->set_status(status_of(request->service()));
  }
  if (response->status() == Response::SERVICE_UNKNOWN) {
    reactor->Finish({grpc::StatusCode::NOT_FOUND, "this server has no such model"});
  } else {
    reactor->Finish(grpc::Status::OK);
  }
  return reactor;
}

grpc::ServerWriteReactor<HealthService::Response>* HealthService::Watch(
    grpc::CallbackServerContext* /*context*/, const Request* request) {
  auto* const watcher = new Watcher(*this, request->service());  // OnDone deletes it
  const MutexLock lock(mutex_);
  watchers_.insert(watcher);
  if (closed_) {
    watcher->end();
  } else {
    watcher->tell();
  }
  return watcher;
}

}  // namespace tessera
