#include "load/generator.h"

#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <memory>
#include <random>
#include <thread>
#include <utility>

#include "common/grpc_setup.h"
#include "predictor.pb.h"

namespace tessera {
namespace {

using Steady = std::chrono::steady_clock;

constexpr const char* kMethod = "/predictor.Predictor/Predict";

std::string name_of(const grpc::Status& status) {
  static const std::map<grpc::StatusCode, std::string> names = {
      {grpc::StatusCode::OK, "OK"},
      {grpc::StatusCode::INVALID_ARGUMENT, "INVALID_ARGUMENT"},
      {grpc::StatusCode::NOT_FOUND, "NOT_FOUND"},
      {grpc::StatusCode::RESOURCE_EXHAUSTED, "RESOURCE_EXHAUSTED"},
      {grpc::StatusCode::DEADLINE_EXCEEDED, "DEADLINE_EXCEEDED"},
      {grpc::StatusCode::CANCELLED, "CANCELLED"},
      {grpc::StatusCode::UNAVAILABLE, "UNAVAILABLE"},
      {grpc::StatusCode::INTERNAL, "INTERNAL"}};
  const auto found = names.find(status.error_code());
  return found == names.end() ? "OTHER" : found->second;
}

struct Call {
  std::unique_ptr<grpc::ClientContext> context;
  std::unique_ptr<grpc::ClientAsyncResponseReader<grpc::ByteBuffer>> reader;
  grpc::ByteBuffer answer;
  grpc::Status status;
  TimePoint intended{};
};

// One connection, its completion queue and its share of the load; one thread.
class Connection {
 public:
  Connection(const TrafficOptions& options, const std::vector<grpc::ByteBuffer>& requests,
             std::int64_t samples, int index)
      : options_(options),
        requests_(requests),
        samples_(samples),
        random_(options.seed + static_cast<std::uint64_t>(index)),
        next_request_(static_cast<std::size_t>(index)) {
    grpc::ChannelArguments arguments;
    // Otherwise connections to one address share a socket.
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    arguments.SetMaxReceiveMessageSize(-1);
    channel_ =
        grpc::CreateCustomChannel(options.address, grpc::InsecureChannelCredentials(), arguments);
    stub_ = std::make_unique<grpc::GenericStub>(channel_);
  }

  void run(TimePoint begin) {
    measure_from_ = begin + options_.warm_up;
    end_ = measure_from_ + options_.duration;
    if (options_.rate > 0) {
      run_open(begin);
    } else {
      run_closed(begin);
    }
  }

  TrafficResult result;
  std::uint64_t read = 0;  // answers that the sums are over
  double sum_batch_samples = 0;
  double sum_forward_us = 0;
  double sum_queue_us = 0;

 private:
  void send(TimePoint intended) {
    auto call = std::make_unique<Call>();
    call->intended = intended;
    call->context = std::make_unique<grpc::ClientContext>();
    call->context->set_deadline(
        std::chrono::system_clock::now() +
        std::chrono::duration_cast<std::chrono::system_clock::duration>(options_.timeout));
    call->reader = stub_->PrepareUnaryCall(call->context.get(), kMethod,
                                           requests_[next_request_++ % requests_.size()], &queue_);
    call->reader->StartCall();
    Call* const raw = call.release();  // the queue gives it back
    raw->reader->Finish(&raw->answer, &raw->status, raw);
    ++open_;
  }

  void finish(void* tag) {
    const std::unique_ptr<Call> call(static_cast<Call*>(tag));
    --open_;
    const TimePoint now = Steady::now();
    if (call->intended < measure_from_ || call->intended >= end_) return;
    ++result.codes[name_of(call->status)];
    if (!call->status.ok()) return;
    result.latency.record((now - call->intended).count());
    // Every 16th answer is read: enough for the means, and little of the client's time.
    if (result.latency.count() % 16 != 1) return;
    grpc::Slice slice;
    predictor::PredictionResponse response;
    if (!call->answer.DumpToSingleSlice(&slice).ok() ||
        !response.ParseFromArray(slice.begin(), static_cast<int>(slice.size())) ||
        response.predictions().empty() ||
        response.predictions().begin()->second.data_size() % samples_ != 0) {
      ++result.answers_wrong_size;
      return;
    }
    ++read;
    sum_batch_samples += response.timings().batch_samples();
    sum_forward_us += static_cast<double>(response.timings().forward_us());
    sum_queue_us += static_cast<double>(response.timings().queue_us());
  }

  void run_open(TimePoint begin) {
    const double rate = options_.rate / options_.connections;
    std::exponential_distribution<double> gap(rate);
    TimePoint next = begin;
    while (next < end_ || open_ > 0) {
      const TimePoint now = Steady::now();
      while (next <= now && next < end_) {
        send(next);
        const double wait = options_.poisson ? gap(random_) : 1 / rate;
        next += std::chrono::duration_cast<Duration>(std::chrono::duration<double>(wait));
      }
      void* tag = nullptr;
      bool ok = false;
      const TimePoint until = next < end_ ? next : now + std::chrono::seconds(1);
      const auto state = queue_.AsyncNext(
          &tag, &ok,
          std::chrono::system_clock::now() +
              std::chrono::duration_cast<std::chrono::system_clock::duration>(until - now));
      if (state == grpc::CompletionQueue::GOT_EVENT) finish(tag);
    }
  }

  void run_closed(TimePoint begin) {
    const int share = std::max(1, options_.in_flight / options_.connections);
    for (int i = 0; i < share; ++i) send(begin);
    void* tag = nullptr;
    bool ok = false;
    while (open_ > 0 && queue_.Next(&tag, &ok)) {
      finish(tag);
      const TimePoint now = Steady::now();
      if (now < end_) send(now);
    }
  }

  const TrafficOptions& options_;
  const std::vector<grpc::ByteBuffer>& requests_;
  const std::int64_t samples_;
  std::mt19937_64 random_;
  std::size_t next_request_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<grpc::GenericStub> stub_;
  grpc::CompletionQueue queue_;
  TimePoint measure_from_{};
  TimePoint end_{};
  int open_ = 0;
};

}  // namespace

TrafficResult run_traffic(const TrafficOptions& options, const std::vector<std::string>& requests,
                          std::int64_t samples) {
  prepare_grpc();
  std::vector<grpc::ByteBuffer> buffers;
  for (const std::string& request : requests) {
    const grpc::Slice slice(request);
    buffers.emplace_back(&slice, 1);
  }
  std::vector<std::unique_ptr<Connection>> connections;
  connections.reserve(static_cast<std::size_t>(options.connections));
  for (int i = 0; i < options.connections; ++i) {
    connections.push_back(std::make_unique<Connection>(options, buffers, samples, i));
  }
  {
    const TimePoint begin = Steady::now() + std::chrono::milliseconds(10);
    std::vector<std::jthread> threads;
    threads.reserve(connections.size());
    for (const auto& connection : connections) {
      threads.emplace_back([&, begin] { connection->run(begin); });
    }
  }
  TrafficResult total;
  total.seconds = seconds(options.duration);
  double read = 0;
  for (const auto& connection : connections) {
    const TrafficResult& part = connection->result;
    total.latency.merge(part.latency);
    for (const auto& [code, count] : part.codes) total.codes[code] += count;
    total.answers_wrong_size += part.answers_wrong_size;
    total.batch_samples += connection->sum_batch_samples;
    total.server_forward_us += connection->sum_forward_us;
    total.server_queue_us += connection->sum_queue_us;
    read += static_cast<double>(connection->read);
  }
  for (double* sum : {&total.batch_samples, &total.server_forward_us, &total.server_queue_us}) {
    *sum = read > 0 ? *sum / read : 0;
  }
  return total;
}

}  // namespace tessera
