// The gRPC front with clients on the same machine and a plain function in the model's place: every
// thread of the server but torch's. ThreadSanitizer watches it in seconds (see tsan.ignorelist).
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <fstream>
#include <functional>
#include <future>
#include <string>
#include <thread>

#include "common/grpc_setup.h"
#include "echo_message.h"
#include "echo_model.h"
#include "front/grpc_front.h"
#include "health.grpc.pb.h"
#include "inference.grpc.pb.h"
#include "model/served_model.h"
#include "package/package_error.h"
#include "predictor.grpc.pb.h"
#include "support.h"

namespace tessera {
namespace {

using namespace std::chrono_literals;
using grpc::health::v1::HealthCheckRequest;
using grpc::health::v1::HealthCheckResponse;
using test::message_of;

// message_of's samples, by the other protocol.
inference::ModelInferRequest infer_message_of(float first, int samples, bool typed) {
  inference::ModelInferRequest message;
  message.set_id(std::to_string(first));
  const auto add = [&](const char* name, const char* datatype, std::vector<std::int64_t> shape) {
    auto& input = *message.add_inputs();
    input.set_name(name);
    input.set_datatype(datatype);
    input.mutable_shape()->Assign(shape.begin(), shape.end());
    return input.mutable_contents();
  };
  const auto fill = [&](auto* field, const auto& numbers) {
    if (typed) {
      field->Assign(numbers.begin(), numbers.end());
    } else {
      message.add_raw_input_contents(std::string(reinterpret_cast<const char*>(numbers.data()),
                                                 numbers.size() * sizeof(numbers[0])));
    }
  };
  std::vector<float> dense;
  for (int row = 0; row < samples; ++row) {
    dense.insert(dense.end(), {first + static_cast<float>(row), 0});
  }
  const std::vector<std::int32_t> ones(static_cast<std::size_t>(3 * samples), 1);
  const std::vector<std::int64_t> ids(static_cast<std::size_t>(3 * samples), 1);
  const std::vector<std::int32_t> zeros(static_cast<std::size_t>(samples), 0);
  fill(add("float_features", "FP32", {samples, 2})->mutable_fp32_contents(), dense);
  fill(add("id_list_features_lengths", "INT32", {3 * samples})->mutable_int_contents(), ones);
  fill(add("id_list_features_values", "INT64", {3 * samples})->mutable_int64_contents(), ids);
  fill(add("id_score_list_features_lengths", "INT32", {samples})->mutable_int_contents(), zeros);
  fill(add("id_score_list_features_values", "INT64", {0})->mutable_int64_contents(),
       std::vector<std::int64_t>());
  fill(add("id_score_list_features_weights", "FP32", {0})->mutable_fp32_contents(),
       std::vector<float>());
  return message;
}

// What a model logs of its file's hash, which `compute` gives.
std::string logged_of_hash(FileHash::Compute compute) {
  int ends[2];
  EXPECT_EQ(::pipe(ends), 0);
  const Log log(LogLevel::kInfo, true, ends[1]);
  const ServerConfig config;
  const SteadyClock clock;
  const auto metrics = std::make_shared<ModelMetrics>("m", "7");
  std::promise<void> known;
  LoadedPackage package = test::echo_package();
  package.file_hash = std::make_unique<FileHash>(std::move(compute));
  FileHash& file_hash = *package.file_hash;
  const ServedModel model(std::move(package), config, metrics, clock, log);
  model.log_file_hash();
  file_hash.tell([&](const FileHash::Result&) { known.set_value(); });
  known.get_future().wait();
  std::string line(4096, '\0');
  line.resize(static_cast<std::size_t>(std::max<ssize_t>(::read(ends[0], line.data(), 4096), 0)));
  ::close(ends[0]);
  ::close(ends[1]);
  return line;
}

TEST(ServedModelTest, LogsTheHashOfItsFileOrWhyItHasNone) {
  const std::string found = logged_of_hash([](const std::stop_token&) { return "ab"; });
  EXPECT_TRUE(found.starts_with(
      R"({"event":"file_hash","model":"m","version":"7","sha256":"ab","level":"info",)"))
      << found;
  const std::string failed = logged_of_hash([](const std::stop_token&) -> std::string {
    throw PackageError("m.pt", "was changed while it was being loaded; load it again");
  });
  EXPECT_TRUE(failed.starts_with(
      R"({"event":"file_hash_failed","model":"m","version":"7","error":"package m.pt: was changed )"
      R"(while it was being loaded; load it again","level":"warning",)"))
      << failed;
}

TEST(ServedModelTest, SaysHowManyWorkersCouldBeStarted) {
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_AS, &before), 0);
  std::uint64_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  const std::uint64_t used = pages * static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  if (used > (std::uint64_t{1} << 40)) GTEST_SKIP() << "a sanitizer needs room for itself";
  ServerConfig config;
  config.workers = 1'000;
  const SteadyClock clock;
  const Log log(LogLevel::kError, true);
  const auto metrics = std::make_shared<ModelMetrics>("m", "7");
  // Room for some of their stacks.
  rlimit tight = before;
  tight.rlim_cur = used + (std::uint64_t{256} << 20);
  ASSERT_EQ(::setrlimit(RLIMIT_AS, &tight), 0);
  std::string refusal;
  try {
    const ServedModel model(test::echo_package(), config, metrics, clock, log);
  } catch (const UsageError& error) {
    refusal = error.what();
  }
  ASSERT_EQ(::setrlimit(RLIMIT_AS, &before), 0);
  EXPECT_TRUE(refusal.starts_with("no more than ")) << refusal;
  EXPECT_NE(refusal.find(" of 1000 workers could be started (Resource temporarily unavailable)"),
            std::string::npos)
      << refusal;
}

struct FrontTest : testing::Test {
  explicit FrontTest(std::int64_t max_inflight_bytes = std::int64_t{1} << 30)
      : budget(max_inflight_bytes) {
    prepare_grpc();
    config.batch_limits.max_samples = 16;  // so that some requests are cut and joined
    registry.publish(
        "m", std::make_shared<ServedModel>(test::echo_package(), config, metrics, clock, log));
    const int port = front.start({.host = "127.0.0.1"}, /*threads=*/2);
    channel = grpc::CreateChannel("127.0.0.1:" + std::to_string(port),
                                  grpc::InsecureChannelCredentials());
  }

  // What Server::drain and Server::close do, without their waits.
  void end() {
    admission.shut();
    for (const auto& model : registry.loaded()) model->drain();
    while (admission.active() > 0) std::this_thread::yield();
    EXPECT_EQ(budget.held(), 0);
    front.stop(1s);
    for (const auto& model : registry.loaded()) model->close();
    front.release();
  }

  static void in_threads(int count, const std::function<void(int)>& body) {
    std::vector<std::jthread> threads;
    for (int i = 0; i < count; ++i) threads.emplace_back([&body, i] { body(i); });
  }

  ServerConfig config;
  SteadyClock clock;
  Log log{LogLevel::kError, true};
  std::shared_ptr<ModelMetrics> metrics = std::make_shared<ModelMetrics>("m", "1");
  ModelMetrics unresolved{"", ""};
  Admission admission{[] {}};
  ByteBudget budget;
  Registry registry{{"m"}};
  PredictContext context{registry, unresolved, admission, budget, clock, log};
  http2::Counters counters;
  GrpcFront front{context, {registry, clock, "1.2.3", [] { return false; }}, counters};
  std::shared_ptr<grpc::Channel> channel;
};

TEST_F(FrontTest, ARefusalOfADrainCountsUnderItsModel) {
  admission.shut();
  const auto stub = predictor::Predictor::NewStub(channel);
  grpc::ClientContext call;
  predictor::PredictionResponse response;
  const grpc::Status refused = stub->Predict(&call, message_of(1, 1), &response);
  EXPECT_EQ(refused.error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(refused.error_message(), "the server is draining");
  constexpr auto kReason = static_cast<std::size_t>(RejectReason::kDraining);
  EXPECT_EQ(metrics->rejected[kReason], 1u);
  EXPECT_EQ(unresolved.rejected[kReason], 0u);
  end();
}

TEST_F(FrontTest, AnswersEveryClientWithItsOwnScores) {
  in_threads(4, [&](int client) {
    const auto stub = predictor::Predictor::NewStub(channel);
    for (int call = 0; call < 100; ++call) {
      const int samples = 1 + (client + call) % 40;
      grpc::ClientContext of_call;
      predictor::PredictionResponse response;
      const auto first = static_cast<float>(1'000 * client + call);
      const grpc::Status status = stub->Predict(&of_call, message_of(first, samples), &response);
      ASSERT_TRUE(status.ok()) << status.error_message();
      const auto& scores = response.predictions().at("default").data();
      ASSERT_EQ(scores.size(), samples);
      for (int row = 0; row < samples; ++row) {
        EXPECT_EQ(scores[row], first + static_cast<float>(row));
      }
    }
  });
  end();
}

struct FullFrontTest : FrontTest {
  FullFrontTest() : FrontTest(3'600'000) {}
};

TEST_F(FullFrontTest, HoldsAsManyBytesAsItMay) {
  constexpr int kSamples = 16'000;  // 1.7 MB, so that two requests are let in at once
  const predictor::PredictionRequest message = message_of(0, kSamples);
  std::atomic<int> answered = 0;
  std::atomic<int> refused = 0;
  in_threads(8, [&](int) {
    const auto stub = predictor::Predictor::NewStub(channel);
    for (int call = 0; call < 20; ++call) {
      grpc::ClientContext of_call;
      predictor::PredictionResponse response;
      const grpc::Status status = stub->Predict(&of_call, message, &response);
      if (status.ok()) {
        const auto& scores = response.predictions().at("default").data();
        ASSERT_EQ(scores.size(), kSamples);
        EXPECT_EQ(scores[kSamples - 1], static_cast<float>(kSamples - 1));
        ++answered;
      } else {
        EXPECT_EQ(status.error_code(), grpc::RESOURCE_EXHAUSTED) << status.error_message();
        EXPECT_TRUE(status.error_message().starts_with("the server is full: requests and answers"))
            << status.error_message();
        ++refused;
      }
    }
  });
  EXPECT_GT(answered, 0);
  EXPECT_EQ(metrics->rejected[static_cast<std::size_t>(RejectReason::kQueueFull)],
            static_cast<std::uint64_t>(refused));
  end();
}

struct NarrowFrontTest : FrontTest {
  NarrowFrontTest() : FrontTest(20'000) {}
};

TEST_F(NarrowFrontTest, ARequestThatCanNeverComeInIsInvalid) {
  const auto stub = predictor::Predictor::NewStub(channel);
  grpc::ClientContext of_call;
  predictor::PredictionResponse response;
  const predictor::PredictionRequest message = message_of(0, 100);
  const grpc::Status status = stub->Predict(&of_call, message, &response);
  EXPECT_EQ(status.error_code(), grpc::INVALID_ARGUMENT);
  EXPECT_EQ(status.error_message(),
            text("the request takes ", 16'384 + 100 * 68 + message.ByteSizeLong(),
                 " bytes in the server, the limit is 20000"));
  end();
}

// Both protocols at once, and calls about the server beside them.
TEST_F(FrontTest, AnswersModelInferWithItsOwnScores) {
  in_threads(4, [&](int client) {
    const auto stub = inference::GRPCInferenceService::NewStub(channel);
    const auto predictor = predictor::Predictor::NewStub(channel);
    for (int call = 0; call < 100; ++call) {
      const int samples = 1 + (client + call) % 40;
      const auto first = static_cast<float>(1'000 * client + call);
      inference::ModelInferRequest message = infer_message_of(first, samples, call % 3 == 0);
      if (call % 2) message.add_outputs()->set_name("default");
      grpc::ClientContext of_call;
      inference::ModelInferResponse response;
      const grpc::Status status = stub->ModelInfer(&of_call, message, &response);
      ASSERT_TRUE(status.ok()) << status.error_message();
      EXPECT_EQ(response.id(), message.id());
      EXPECT_EQ(response.model_name(), "m");
      ASSERT_EQ(response.outputs_size(), 1);
      EXPECT_EQ(response.outputs(0).shape(0), samples);
      std::vector<float> scores(static_cast<std::size_t>(samples));
      ASSERT_EQ(response.raw_output_contents(0).size(), scores.size() * 4);
      std::memcpy(scores.data(), response.raw_output_contents(0).data(), scores.size() * 4);
      for (int row = 0; row < samples; ++row) {
        EXPECT_EQ(scores[static_cast<std::size_t>(row)], first + static_cast<float>(row));
      }
      grpc::ClientContext of_other;
      predictor::PredictionResponse other;
      ASSERT_TRUE(predictor->Predict(&of_other, message_of(first, 1), &other).ok());
      EXPECT_EQ(other.predictions().at("default").data(0), first);
      grpc::ClientContext of_statistics;
      inference::ModelStatisticsResponse statistics;
      ASSERT_TRUE(stub->ModelStatistics(&of_statistics, {}, &statistics).ok());
      EXPECT_GT(statistics.model_stats(0).inference_count(), 0u);
    }
  });
  grpc::ClientContext of_call;
  inference::ModelStatisticsResponse statistics;
  const auto stub = inference::GRPCInferenceService::NewStub(channel);
  ASSERT_TRUE(stub->ModelStatistics(&of_call, {}, &statistics).ok());
  EXPECT_EQ(statistics.model_stats(0).inference_stats().success().count(), 800u);
  end();
}

TEST_F(FrontTest, TellsOfTheServerAndItsModels) {
  const auto stub = inference::GRPCInferenceService::NewStub(channel);
  const auto context_of = [] { return std::make_unique<grpc::ClientContext>(); };
  inference::ServerMetadataResponse server;
  ASSERT_TRUE(stub->ServerMetadata(context_of().get(), {}, &server).ok());
  EXPECT_EQ(server.version(), "1.2.3");
  inference::ModelConfigResponse config_told;
  ASSERT_TRUE(stub->ModelConfig(context_of().get(), {}, &config_told).ok());
  EXPECT_EQ(config_told.config().default_model_filename(), "m.pt");
  inference::RepositoryIndexResponse index;
  ASSERT_TRUE(stub->RepositoryIndex(context_of().get(), {}, &index).ok());
  EXPECT_EQ(index.models(0).state(), "READY");
  inference::ModelReadyRequest unknown;
  unknown.set_name(std::string(100'000, 'x'));
  inference::ModelReadyResponse ready;
  const grpc::Status status = stub->ModelReady(context_of().get(), unknown, &ready);
  EXPECT_EQ(status.error_code(), grpc::StatusCode::NOT_FOUND);
  EXPECT_EQ(status.error_message().size(), 1'000u);
  end();
}

TEST_F(FrontTest, LivesThroughCancelledAndLateAndMalformedCalls) {
  in_threads(4, [&](int client) {
    const auto stub = predictor::Predictor::NewStub(channel);
    const auto other = inference::GRPCInferenceService::NewStub(channel);
    for (int call = 0; call < 100; ++call) {
      grpc::ClientContext of_call;
      predictor::PredictionResponse response;
      predictor::PredictionRequest message = message_of(0, 20);
      inference::ModelInferResponse inferred;
      inference::ModelInferRequest infer = infer_message_of(0, 20, call % 5 == 0);
      std::jthread canceller;
      const int kind = (client + call / 2) % 4;
      if (kind == 1) of_call.set_deadline(std::chrono::system_clock::now() + 300us);
      if (kind == 2) canceller = std::jthread([&] { of_call.TryCancel(); });
      if (kind == 3) {
        message.set_batch_size(21);
        infer.mutable_inputs(1)->set_shape(0, 63);
      }
      const grpc::Status status = call % 2 ? other->ModelInfer(&of_call, infer, &inferred)
                                           : stub->Predict(&of_call, message, &response);
      const grpc::StatusCode code = status.error_code();
      const grpc::StatusCode may[] = {grpc::OK, grpc::DEADLINE_EXCEEDED, grpc::CANCELLED,
                                      grpc::INVALID_ARGUMENT};
      const bool may_be_answered = kind != 3;
      EXPECT_TRUE(code == may[kind] || (may_be_answered && status.ok()))
          << "kind " << kind << ": " << code << " " << status.error_message();
    }
  });
  end();
}

TEST_F(FrontTest, WatchersHearOfEveryLastState) {
  std::atomic<int> finished = 0;
  std::jthread setter([&] {
    for (int i = 0; finished < 4; ++i) front.set_serving("m", i % 2 == 0);
    front.set_serving("m", true);
  });
  in_threads(4, [&](int) {
    const auto stub = grpc::health::v1::Health::NewStub(channel);
    HealthCheckRequest message;
    message.set_service("m");
    HealthCheckResponse response;
    for (int i = 0; i < 20; ++i) {
      grpc::ClientContext of_watch;
      const auto watch = stub->Watch(&of_watch, message);
      ASSERT_TRUE(watch->Read(&response));
      of_watch.TryCancel();
      EXPECT_EQ(watch->Finish().error_code(), grpc::StatusCode::CANCELLED);
      grpc::ClientContext of_check;
      ASSERT_TRUE(stub->Check(&of_check, message, &response).ok());
    }
    ++finished;
  });
  setter.join();
  const auto stub = grpc::health::v1::Health::NewStub(channel);
  HealthCheckRequest message;
  message.set_service("m");
  HealthCheckResponse response;
  grpc::ClientContext of_watch;
  const auto watch = stub->Watch(&of_watch, message);
  ASSERT_TRUE(watch->Read(&response));
  EXPECT_EQ(response.status(), HealthCheckResponse::SERVING);
  std::jthread ender([&] { end(); });
  while (watch->Read(&response)) {
  }
  EXPECT_NE(watch->Finish().error_code(), grpc::StatusCode::INTERNAL);
}

TEST_F(FrontTest, WatchesEndWithTheLastStateToldAndOk) {
  front.set_serving("m", true);
  const auto stub = grpc::health::v1::Health::NewStub(channel);
  HealthCheckRequest message;
  message.set_service("m");
  std::vector<std::unique_ptr<grpc::ClientContext>> contexts;
  std::vector<std::unique_ptr<grpc::ClientReader<HealthCheckResponse>>> watches;
  for (int i = 0; i < 40; ++i) {
    contexts.push_back(std::make_unique<grpc::ClientContext>());
    watches.push_back(stub->Watch(contexts.back().get(), message));
  }
  HealthCheckResponse response;
  for (const auto& watch : watches) {
    ASSERT_TRUE(watch->Read(&response));
    EXPECT_EQ(response.status(), HealthCheckResponse::SERVING);
  }
  // gRPC may not yet have said that those were written.
  front.set_serving("m", false);
  std::jthread ender([&] { end(); });
  for (const auto& watch : watches) {
    while (watch->Read(&response)) {
    }
    EXPECT_EQ(response.status(), HealthCheckResponse::NOT_SERVING);
    const grpc::Status status = watch->Finish();
    EXPECT_TRUE(status.ok()) << status.error_code() << " " << status.error_message();
  }
}

TEST_F(FrontTest, RefusesWhileItEnds) {
  std::atomic<int> answered = 0;
  std::jthread ender([&] {
    while (answered < 50) std::this_thread::yield();
    end();
  });
  in_threads(4, [&](int) {
    const auto stub = predictor::Predictor::NewStub(channel);
    grpc::Status status;
    while (true) {
      grpc::ClientContext of_call;
      predictor::PredictionResponse response;
      status = stub->Predict(&of_call, message_of(0, 1), &response);
      if (!status.ok()) break;
      ++answered;
    }
    EXPECT_TRUE(status.error_code() == grpc::StatusCode::UNAVAILABLE ||
                status.error_code() == grpc::StatusCode::CANCELLED)
        << status.error_code() << " " << status.error_message();
  });
}

}  // namespace
}  // namespace tessera
