#include "front/health_service.h"

#include <algorithm>
#include <atomic>
#include <optional>
#include <utility>

namespace tessera {

// The watches of one loop, and how its thread is told that there is something to tell.
class HealthService::Watches final : public http2::EventLoop::Task {
 public:
  explicit Watches(http2::EventLoop& loop) : loop_(loop) {}

  // Any thread.
  void tell() {
    if (!posted_.exchange(true)) loop_.post(*this);
  }

  std::vector<Watch*> all;  // the loop's thread alone

 private:
  void run() override;

  http2::EventLoop& loop_;
  std::atomic<bool> posted_ = false;
};

class HealthService::Watch final : public http2::Call {
 public:
  Watch(const HealthService& service, Watches& watches, http2::EventLoop& its_loop)
      : Call(Kind::kStreaming, its_loop), service_(service), watches_(watches) {
    watches_.all.push_back(this);
  }

  // Sends the state where the client has not heard of it.
  void tell() {
    if (!name_.has_value() || finished_) return;
    const Response::ServingStatus now = service_.status_of(*name_);
    if (told_ != now) {
      told_ = now;
      Response response;
      response.set_status(now);
      const std::size_t bytes = response.ByteSizeLong();
      response.SerializeToArray(begin_message(bytes), static_cast<int>(bytes));
      flush();
    }
    if (service_.closed()) end_with({});
  }

 private:
  void on_message(std::span<const std::byte> message) override {
    Request request;
    const Status status = parse_message(message, request);
    if (name_.has_value()) {
      end_with({Code::kUnimplemented, "the call has several messages, expected one"});
    } else if (!status.ok()) {
      end_with(status);
    } else {
      name_ = request.service();
      tell();
    }
  }

  void on_last_message() override {
    if (!name_.has_value())
      end_with({Code::kUnimplemented, "the call has no message, expected one"});
  }

  void on_refused(const Status&) override { finished_ = true; }

  void on_end() override {
    const std::unique_ptr<Watch> owner(this);
    std::erase(watches_.all, this);
  }

  void end_with(const Status& status) {
    if (std::exchange(finished_, true)) return;
    finish(status);
  }

  const HealthService& service_;
  Watches& watches_;
  std::optional<std::string> name_;  // once the client has said it
  std::optional<Response::ServingStatus> told_;
  bool finished_ = false;
};

void HealthService::Watches::run() {
  posted_.store(false);
  for (Watch* const watch : all) watch->tell();
}

class HealthService::WatchMethod final : public http2::Method {
 public:
  WatchMethod(const HealthService& service, Watches& watches)
      : service_(service), watches_(watches) {}

  http2::Call& begin(http2::EventLoop& loop) override {
    return *new Watch(service_, watches_, loop);
  }

 private:
  const HealthService& service_;
  Watches& watches_;
};

HealthService::HealthService(const std::vector<std::string>& names) {
  const MutexLock lock(mutex_);
  serving_[""] = false;
  for (const std::string& name : names) serving_[name] = false;
}

HealthService::~HealthService() = default;

void HealthService::add_to(http2::EventLoop& loop, http2::MethodTable& table) {
  watches_.push_back(std::make_unique<Watches>(loop));
  using Access = http2::MethodTable::Access;  // probes need no token
  table.add("/grpc.health.v1.Health/Check",
            std::make_unique<MessageMethod<Request, Response>>(
                [this](const Request& request, Response& response) -> Status {
                  response.set_status(status_of(request.service()));
                  if (response.status() != Response::SERVICE_UNKNOWN) return {};
                  return {Code::kNotFound, "this server has no such model"};
                }),
            Access::kOpen);
  table.add("/grpc.health.v1.Health/Watch", std::make_unique<WatchMethod>(*this, *watches_.back()),
            Access::kOpen);
}

void HealthService::set(const std::string& name, bool serving) {
  {
    const MutexLock lock(mutex_);
    serving_[name] = serving;
  }
  tell_all();
}

void HealthService::forget(const std::string& name) {
  {
    const MutexLock lock(mutex_);
    serving_.erase(name);
  }
  tell_all();
}

void HealthService::close() {
  {
    const MutexLock lock(mutex_);
    closed_ = true;
  }
  tell_all();
}

void HealthService::tell_all() {
  for (const auto& watches : watches_) watches->tell();
}

bool HealthService::closed() const {
  const MutexLock lock(mutex_);
  return closed_;
}

HealthService::Response::ServingStatus HealthService::status_of(const std::string& name) const {
  const MutexLock lock(mutex_);
  const auto found = serving_.find(name);
  if (found == serving_.end()) return Response::SERVICE_UNKNOWN;
  return found->second ? Response::SERVING : Response::NOT_SERVING;
}

}  // namespace tessera
