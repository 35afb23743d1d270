#include "load/generator.h"

#include <algorithm>
#include <array>
#include <memory>
#include <random>
#include <span>
#include <thread>
#include <utility>

#include "common/thread_name.h"
#include "http2/event_loop.h"
#include "load/address.h"
#include "load/call_record.h"
#include "load/grpc_channel.h"
#include "predictor.pb.h"

namespace tessera {
namespace {

// One connection and its share of the load; one thread.
class Connection : private GrpcChannel::Caller {
 public:
  Connection(const TrafficOptions& options, const Address& address, const http2::TlsContext& tls,
             const std::vector<std::string>& requests, std::int64_t samples, int index)
      : options_(options),
        requests_(requests),
        samples_(samples),
        random_(options.seed + static_cast<std::uint64_t>(index)),
        next_request_(static_cast<std::size_t>(index)),
        channel_(loop_, address, options.method, options.authorization, tls, options.timeout,
                 *this),
        next_([this] {
          if (options_.schedule != nullptr) {
            send_scheduled();
          } else {
            send_due();
          }
        }) {}

  void run(TimePoint begin) {
    begin_ = begin;
    measure_from_ = begin + options_.warm_up;
    end_ = measure_from_ + options_.duration;
    if (options_.schedule != nullptr) {
      measure_from_ = begin;
      end_ = kNever;
      if (all_sent()) return;  // more connections than requests
      loop_.schedule(next_, begin);
    } else if (options_.rate > 0) {
      due_ = begin;
      loop_.schedule(next_, begin);
    } else {
      const int share = std::max(1, options_.in_flight / options_.connections);
      for (int i = 0; i < share; ++i) send(begin);
    }
    loop_.run();
  }

  // The calls that were measured, by how they ended.
  std::map<std::string, std::uint64_t> codes() const {
    std::map<std::string, std::uint64_t> named;
    for (std::size_t code = 0; code < counts_.size(); ++code) {
      if (counts_[code] > 0) {
        named[std::string(grpc_code_name(static_cast<GrpcCode>(code)))] = counts_[code];
      }
    }
    return named;
  }

  TrafficResult result;
  std::uint64_t read = 0;  // answers that the sums are over
  double sum_batch_samples = 0;
  double sum_forward_us = 0;
  double sum_queue_us = 0;

 private:
  void send(TimePoint intended) { send(next_request_++ % requests_.size(), intended); }

  void send(std::size_t index, TimePoint intended) {
    ++open_;
    channel_.call(std::as_bytes(std::span(requests_[index])), {intended, index},
                  options_.methods == nullptr ? std::string_view() : (*options_.methods)[index]);
  }

  bool closed_loop() const { return options_.rate == 0 && options_.schedule == nullptr; }

  bool all_sent() const {
    if (options_.schedule != nullptr) return next_request_ >= options_.schedule->size();
    return due_ >= end_;
  }

  // Sends what is due of the schedule's requests, of which every connection has its share.
  void send_scheduled() {
    const std::vector<Duration>& schedule = *options_.schedule;
    const TimePoint now = std::chrono::steady_clock::now();
    while (!all_sent() && begin_ + schedule[next_request_] <= now) {
      send(next_request_, begin_ + schedule[next_request_]);
      next_request_ += static_cast<std::size_t>(options_.connections);
    }
    if (!all_sent()) {
      loop_.schedule(next_, begin_ + schedule[next_request_]);
    } else if (open_ == 0) {
      loop_.stop();
    }
  }

  // Open loop: sends what is due, and comes back when the next request is.
  void send_due() {
    const double rate = options_.rate / options_.connections;
    std::exponential_distribution<double> gap(rate);
    const TimePoint now = std::chrono::steady_clock::now();
    while (due_ <= now && due_ < end_) {
      send(due_);
      const double wait = options_.poisson ? gap(random_) : 1 / rate;
      due_ += std::chrono::duration_cast<Duration>(std::chrono::duration<double>(wait));
    }
    if (due_ < end_) {
      loop_.schedule(next_, due_);
    } else if (open_ == 0) {
      loop_.stop();
    }
  }

  void finished(const CallTag& tag, GrpcCode code, std::string_view answer) override {
    --open_;
    const TimePoint now = std::chrono::steady_clock::now();
    if (tag.intended >= measure_from_ && tag.intended < end_) {
      const Duration latency = now - tag.intended;
      if (options_.record != nullptr) options_.record->add(tag, latency, code, answer);
      measure(latency, code, answer);
    }
    result.seconds = seconds(now - begin_);
    if (closed_loop() && now < end_) {
      send(now);
    } else if (open_ == 0 && (closed_loop() || all_sent())) {
      loop_.stop();
    }
  }

  void measure(Duration latency, GrpcCode code, std::string_view answer) {
    ++counts_[static_cast<std::size_t>(code) % counts_.size()];
    if (code != 0) return;
    result.latency.record(latency.count());
    // Few answers are read: enough for the means, and little of the client's time.
    const auto every = static_cast<std::uint64_t>(options_.read_every);
    if (samples_ == 0 || (result.latency.count() - 1) % every != 0) return;
    predictor::PredictionResponse response;
    if (!response.ParseFromArray(answer.data(), static_cast<int>(answer.size())) ||
        response.predictions().empty() ||
        response.predictions().begin()->second.data_size() % samples_ != 0) {
      ++result.answers_wrong_size;
      return;
    }
    ++read;
    sum_batch_samples += response.timings().batch_samples();
    sum_forward_us += static_cast<double>(response.timings().forward_us());
    sum_queue_us += static_cast<double>(response.timings().queue_us());
    const predictor::StageTimings& times = response.timings();
    const std::int64_t pass_us =
        times.assemble_us() + times.transfer_us() + times.forward_us() + times.split_us();
    result.passes.record(1'000 * pass_us);
  }

  const TrafficOptions& options_;
  const std::vector<std::string>& requests_;
  const std::int64_t samples_;
  std::mt19937_64 random_;
  std::size_t next_request_;
  http2::EventLoop loop_;
  GrpcChannel channel_;
  http2::EventLoop::Timer next_;
  std::array<std::uint64_t, 17> counts_{};  // by code
  TimePoint begin_{};
  TimePoint measure_from_{};
  TimePoint end_{};
  TimePoint due_{};  // open loop: when the next request is to be sent
  int open_ = 0;
};

}  // namespace

TrafficResult run_traffic(const TrafficOptions& options, const std::vector<std::string>& requests,
                          std::int64_t samples) {
  const Address address = resolve_grpc(options.address);
  const http2::TlsContext tls =
      options.tls.ca.empty() ? nullptr : make_client_tls(options.tls, "h2");
  std::vector<std::string> framed;
  framed.reserve(requests.size());
  for (const std::string& request : requests) framed.push_back(framed_message(request));
  std::vector<std::unique_ptr<Connection>> connections;
  connections.reserve(static_cast<std::size_t>(options.connections));
  for (int i = 0; i < options.connections; ++i) {
    connections.push_back(std::make_unique<Connection>(options, address, tls, framed, samples, i));
  }
  {
    const TimePoint begin = std::chrono::steady_clock::now() + std::chrono::milliseconds(10);
    std::vector<std::jthread> threads;
    threads.reserve(connections.size());
    for (std::size_t i = 0; i < connections.size(); ++i) {
      threads.emplace_back([&, begin, i] {
        name_thread("connection", i);
        connections[i]->run(begin);
      });
    }
  }
  TrafficResult total;
  total.seconds = options.schedule == nullptr ? seconds(options.duration) : 0;
  double read = 0;
  for (const auto& connection : connections) {
    const TrafficResult& part = connection->result;
    // A schedule takes until its last answer.
    if (options.schedule != nullptr) total.seconds = std::max(total.seconds, part.seconds);
    total.latency.merge(part.latency);
    total.passes.merge(part.passes);
    for (const auto& [code, count] : connection->codes()) total.codes[code] += count;
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
