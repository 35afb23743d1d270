#include "front/grpc_front.h"

#include <grpc/support/log.h>
#include <grpcpp/alarm.h>
#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/resource_quota.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "common/enums.h"
#include "common/grpc_setup.h"
#include "common/text.h"
#include "front/connections.h"
#include "front/grpc_status.h"
#include "front/health_service.h"
#include "front/kserve_service.h"
#include "predictor.grpc.pb.h"
#include "server/config.h"

namespace tessera {
namespace {

// Calls of each method that wait on each queue for a client: a burst of so many needs no turn of
// the queue.
constexpr int kWaitingCalls = 32;
// Calls of each method kept for reuse on each queue; a burst above it allocates and frees.
constexpr std::size_t kKeptCalls = 1'024;
// A call that holds a larger message, or has made more of it, gives that memory back instead of
// keeping it.
constexpr std::size_t kKeptBytes = 256 * 1024;

// Calls of one connection at a time. Clients wait with more; what misbehaving ones make gRPC hold
// is some 10 KiB for each.
constexpr int kCallsPerConnection = 1'000;
// What gRPC may hold beside the messages that are being received: connections, calls, answers on
// their way.
constexpr std::int64_t kNetworkBytes = 64 * 1024 * 1024;

using PredictService = predictor::Predictor::WithRawMethod_Predict<predictor::Predictor::Service>;

struct Services {
  explicit Services(ServerFacts facts) : kserve(std::move(facts)) {}

  PredictService predict;
  KserveService kserve;
};

// What a call on a completion queue may be.
enum class Method { kPredict, kModelInfer };
constexpr Method kMethods[] = {Method::kPredict, Method::kModelInfer};
static_assert(std::size(kMethods) == enum_size<Method::kModelInfer>());

std::unique_ptr<WireProtocol> make_protocol(Method method) {
  return method == Method::kPredict ? make_predict_protocol() : make_infer_protocol();
}

TimePoint deadline_of(const grpc::ServerContext& context) {
  const gpr_timespec deadline = context.raw_deadline();
  if (gpr_time_cmp(deadline, gpr_inf_future(deadline.clock_type)) == 0) return kNever;
  const gpr_timespec left = gpr_time_sub(gpr_convert_clock_type(deadline, GPR_CLOCK_MONOTONIC),
                                         gpr_now(GPR_CLOCK_MONOTONIC));
  return later(std::chrono::steady_clock::now(), std::chrono::seconds(left.tv_sec),
               std::chrono::nanoseconds(left.tv_nsec));
}

// What a completion queue hands back.
struct Event {
  void (*handle)(void* target, bool ok) = nullptr;
  void* target = nullptr;
};

// The process's server is being stopped.
std::atomic<bool> stopping = false;

class CompletionThread;

// One call, used again and again. It belongs to its completion thread; only begin_reply,
// send_reply and refuse may come from a worker, and touch nothing after they have handed the
// answer to gRPC.
class GrpcCall final : public PredictCall {
 public:
  GrpcCall(const PredictContext& context, Method method, CompletionThread& thread)
      : PredictCall(context, make_protocol(method)), method_(method), owner_(thread) {}

  Method method() const { return method_; }

  // Waits for a client.
  void arm();

 private:
  template <void (GrpcCall::*Method)(bool)>
  Event event() {
    return {[](void* target, bool ok) { (static_cast<GrpcCall*>(target)->*Method)(ok); }, this};
  }

  void on_received(bool ok);
  void on_done(bool ok);
  void on_sent(bool ok);
  void one_event_fewer();
  std::byte* begin_reply(std::size_t bytes) override;
  void send_reply() override;
  void refuse(const Status& status) override;
  bool release_request() override;

  const Method method_;
  CompletionThread& owner_;
  std::optional<grpc::ServerContext> context_;
  std::optional<grpc::ServerAsyncResponseWriter<grpc::ByteBuffer>> writer_;
  grpc::ByteBuffer message_;
  grpc::Slice content_;
  grpc::Slice response_;
  int events_ = 0;  // that are still to come for the call in work
  Event received_ = event<&GrpcCall::on_received>();
  Event done_ = event<&GrpcCall::on_done>();
  Event sent_ = event<&GrpcCall::on_sent>();
};

// A completion queue, its thread and its calls.
class CompletionThread {
 public:
  CompletionThread(const PredictContext& context, Services& services,
                   std::unique_ptr<grpc::ServerCompletionQueue> queue)
      : context_(context), services_(services), queue_(std::move(queue)) {}

  void start() {
    for (const Method method : kMethods) {
      for (int i = 0; i < kWaitingCalls; ++i) take(method)->arm();
    }
    thread_ = std::jthread([this] { run(); });
  }

  // After the server has shut down: ends the thread once its last call has been answered.
  // Nothing may be asked of a queue that has ended, so the thread itself ends it, behind
  // whatever was queued before.
  void end() {
    if (thread_.joinable()) {
      look_again(Duration::zero());
      thread_.join();
    } else {
      queue_->Shutdown();
      run();
    }
  }

  Services& services() { return services_; }
  grpc::ServerCompletionQueue* queue() { return queue_.get(); }

  GrpcCall* take(Method method) {
    auto& free = free_[static_cast<std::size_t>(method)];
    if (free.empty()) return new GrpcCall(context_, method, *this);
    GrpcCall* const call = free.back().release();
    free.pop_back();
    return call;
  }

  void put(GrpcCall* call) {
    std::unique_ptr<GrpcCall> owned(call);
    auto& free = free_[static_cast<std::size_t>(call->method())];
    if (free.size() < kKeptCalls) free.push_back(std::move(owned));
  }

  // A call came in, or has been answered.
  void count(int change) { in_work_ += change; }

 private:
  void run() {
    void* tag = nullptr;
    bool ok = false;
    while (queue_->Next(&tag, &ok)) {
      const auto* const event = static_cast<const Event*>(tag);
      event->handle(event->target, ok);
    }
  }

  void look_again(Duration delay) {
    alarm_.Set(queue_.get(),
               std::chrono::system_clock::now() +
                   std::chrono::duration_cast<std::chrono::system_clock::duration>(delay),
               &looked_);
  }

  void on_look(bool /*ok*/) {
    if (in_work_ == 0) {
      queue_->Shutdown();
    } else {
      look_again(std::chrono::milliseconds(5));
    }
  }

  const PredictContext& context_;
  Services& services_;
  std::unique_ptr<grpc::ServerCompletionQueue> queue_;
  // Both belong to the thread.
  std::array<std::vector<std::unique_ptr<GrpcCall>>, std::size(kMethods)> free_;
  int in_work_ = 0;
  grpc::Alarm alarm_;
  Event looked_{[](void* target, bool ok) { static_cast<CompletionThread*>(target)->on_look(ok); },
                this};
  std::jthread thread_;
};

void GrpcCall::arm() {
  context_.emplace();
  writer_.emplace(&*context_);
  message_.Clear();
  cancelled.store(false, std::memory_order_relaxed);
  context_->AsyncNotifyWhenDone(&done_);
  grpc::ServerCompletionQueue* const queue = owner_.queue();
  if (method_ == Method::kPredict) {
    owner_.services().predict.RequestPredict(&*context_, &message_, &*writer_, queue, queue,
                                             &received_);
  } else {
    owner_.services().kserve.RequestModelInfer(&*context_, &message_, &*writer_, queue, queue,
                                               &received_);
  }
}

void GrpcCall::on_received(bool ok) {
  if (!ok) {  // the server is shutting down; without a call there is no "done" to come either
    owner_.put(this);
    return;
  }
  owner_.count(+1);
  owner_.take(method_)->arm();
  events_ = 2;  // done and sent
  deadline = deadline_of(*context_);
  // One piece, without a copy where it came as one.
  if (!message_.TrySingleSlice(&content_).ok() && !message_.DumpToSingleSlice(&content_).ok()) {
    content_ = grpc::Slice();
  }
  message_.Clear();  // else the pieces would stay beside their copy
  start({reinterpret_cast<const std::byte*>(content_.begin()), content_.size()});
}

void GrpcCall::on_done(bool /*ok*/) {
  if (context_->IsCancelled()) cancelled.store(true, std::memory_order_relaxed);
  one_event_fewer();
}

void GrpcCall::on_sent(bool /*ok*/) {
  leave();
  one_event_fewer();
}

void GrpcCall::one_event_fewer() {
  if (--events_ > 0) return;
  content_ = grpc::Slice();
  response_ = grpc::Slice();
  writer_.reset();
  context_.reset();
  owner_.count(-1);
  owner_.put(this);
}

std::byte* GrpcCall::begin_reply(std::size_t bytes) {
  // gRPC owns the memory from the beginning, so that the answer is written once.
  grpc_slice memory = grpc_slice_malloc(bytes);
  response_ = grpc::Slice(memory, grpc::Slice::STEAL_REF);
  return reinterpret_cast<std::byte*>(const_cast<std::uint8_t*>(response_.begin()));
}

void GrpcCall::send_reply() {
  const grpc::ByteBuffer buffer(&response_, 1);
  hand_over();
  writer_->Finish(buffer, grpc::Status::OK, &sent_);
}

void GrpcCall::refuse(const Status& status) {
  const grpc::Status refusal = to_grpc(status);
  hand_over();
  writer_->FinishWithError(refusal, &sent_);
}

bool GrpcCall::release_request() {
  if (content_.size() <= kKeptBytes && held_bytes() <= kKeptBytes) return false;
  content_ = grpc::Slice();
  free_memory();
  return true;
}

}  // namespace

struct GrpcFront::State {
  State(const PredictContext& given, ServerFacts facts)
      : context(given), services(std::move(facts)), health(given.registry.names()) {}

  const PredictContext& context;
  Services services;
  HealthService health;
  std::vector<std::unique_ptr<CompletionThread>> threads;
  std::unique_ptr<grpc::Server> server;
  int port = 0;
};

GrpcFront::GrpcFront(const PredictContext& context, ServerFacts facts)
    : state_(std::make_unique<State>(context, std::move(facts))) {}

GrpcFront::~GrpcFront() {
  stop(Duration::zero());
  release();
}

void GrpcFront::log_to(const Log& log) {
  // gRPC takes a plain function, so that the log has to be found by one.
  static std::atomic<const Log*> target;
  target = &log;
  gpr_set_log_function([](gpr_log_func_args* message) {
    const Log::Fields fields = {{"message", std::string(message->message)},
                                {"file", std::string(message->file)},
                                {"line", std::int64_t{message->line}}};
    // That its sockets have ended is expected while we end them.
    if (message->severity == GPR_LOG_SEVERITY_ERROR && !stopping) {
      target.load()->client_warning("grpc", fields);
    } else {
      target.load()->debug("grpc", fields);
    }
  });
}

int GrpcFront::start(const GrpcOptions& options) {
  prepare_grpc();
  grpc::EnableDefaultHealthCheckService(false);
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  grpc::ServerBuilder builder;
  const bool v6 = options.host.find(':') != std::string::npos;
  const std::string address =
      v6 ? text("[", options.host, "]:", options.port) : text(options.host, ":", options.port);
  int port = 0;
  builder.AddListeningPort(address, grpc::InsecureServerCredentials(), &port);
  builder.RegisterService(&state_->services.predict);
  builder.RegisterService(&state_->services.kserve);
  builder.RegisterService(&state_->health);
  builder.SetMaxReceiveMessageSize(options.max_message_bytes);
  builder.SetMaxSendMessageSize(options.max_message_bytes);
  // A second server on the port must fail, not share its calls.
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  // Clients may ping as often as they like, also between calls: the defaults send GOAWAY to
  // whoever pings more often than every five minutes.
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 1'000);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_PING_STRIKES, 0);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, kCallsPerConnection);
  // gRPC reads a message whole before it says that there is one. Where those take too much, it ends
  // calls with RESOURCE_EXHAUSTED.
  grpc::ResourceQuota quota("incoming");
  quota.Resize(static_cast<std::size_t>(options.max_incoming_bytes + kNetworkBytes));
  builder.SetResourceQuota(quota);
  // gRPC unpacks a message before it looks at its size, to a thousand times what came.
  builder.SetCompressionAlgorithmSupportStatus(GRPC_COMPRESS_DEFLATE, false);
  builder.SetCompressionAlgorithmSupportStatus(GRPC_COMPRESS_GZIP, false);
  for (int i = 0; i < options.threads; ++i) {
    state_->threads.push_back(std::make_unique<CompletionThread>(state_->context, state_->services,
                                                                 builder.AddCompletionQueue()));
  }
  state_->server = builder.BuildAndStart();
  if (state_->server == nullptr || port == 0) {
    throw UsageError(text("the gRPC address ", address,
                          " cannot be listened on: another program has the port or the host is "
                          "not this machine's; choose another --port or --host"));
  }
  state_->port = port;
  for (const auto& thread : state_->threads) thread->start();
  return port;
}

void GrpcFront::set_serving(const std::string& service, bool serving) {
  state_->health.set(service, serving);
}

void GrpcFront::stop(Duration grace) {
  if (state_->server == nullptr) return;
  const TimePoint until = std::chrono::steady_clock::now() + grace;
  state_->health.close(until);
  stopping = true;
  end_connections(state_->port, until);
  const Duration left = std::max(until - std::chrono::steady_clock::now(), Duration::zero());
  state_->server->Shutdown(std::chrono::system_clock::now() +
                           std::chrono::duration_cast<std::chrono::system_clock::duration>(left));
}

void GrpcFront::release() {
  for (const auto& thread : state_->threads) thread->end();
  state_->threads.clear();
  state_->server.reset();
}

}  // namespace tessera
