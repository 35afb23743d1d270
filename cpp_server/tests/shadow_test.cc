// A shadow computes calls that another version answers, and nothing that a client sees depends on
// it.
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <array>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "common/grpc_setup.h"
#include "echo_message.h"
#include "echo_model.h"
#include "front/grpc_front.h"
#include "front/shadow_call.h"
#include "predictor.grpc.pb.h"
#include "repository/routes.h"

namespace tessera {
namespace {

std::uint64_t count_of(const ShadowMetrics& metrics, ShadowResult result) {
  return metrics.calls[static_cast<std::size_t>(result)].load();
}

struct Compared {
  std::uint64_t compared = 0;
  std::uint64_t dropped = 0;
  std::uint64_t failed = 0;
  double sum = 0;

  bool operator==(const Compared&) const = default;
};

using Scores = std::vector<float>;

// What comes of the two versions' scores of one output, in either order.
Compared compared(const Scores& first, const Scores& second) {
  const auto metrics = std::make_shared<ShadowMetrics>("m", "1", "2");
  ShadowComparison comparison(metrics);
  for (const Scores* scores : {&first, &second}) {
    const std::array<OutputView, 1> outputs = {
        OutputView{.name = "default", .data = scores->data(), .count = scores->size()}};
    comparison.computed(outputs);
  }
  comparison.ended(ShadowResult::kDropped);  // too late to count
  return {count_of(*metrics, ShadowResult::kCompared), count_of(*metrics, ShadowResult::kDropped),
          count_of(*metrics, ShadowResult::kFailed), metrics->difference.sum()};
}

TEST(ShadowComparisonTest, CountsDifferences) {
  EXPECT_EQ(compared({0.5F, 0.75F}, {0.25F, 1.0F}), (Compared{.compared = 1, .sum = 0.5}));
  EXPECT_EQ(compared({0.5F}, {0.5F}), (Compared{.compared = 1}));
  EXPECT_EQ(compared({0.5F}, {0.5F, 0.5F}), (Compared{.failed = 1}));
  const float nan = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(compared({nan}, {0.5F}), (Compared{.failed = 1}));
}

TEST(ShadowComparisonTest, OutputsOfOneVersionAloneCannotBeCompared) {
  const auto metrics = std::make_shared<ShadowMetrics>("m", "1", "2");
  ShadowComparison comparison(metrics);
  const Scores scores = {1};
  for (const char* name : {"click", "buy"}) {
    const std::array<OutputView, 1> outputs = {
        OutputView{.name = name, .data = scores.data(), .count = 1}};
    comparison.computed(outputs);
  }
  EXPECT_EQ(count_of(*metrics, ShadowResult::kFailed), 1U);
}

struct ShadowTest : testing::Test {
  explicit ShadowTest(std::int64_t max_inflight_bytes = std::int64_t{1} << 30)
      : budget(max_inflight_bytes) {
    prepare_grpc();
    Wanted wanted;
    wanted.versions = {1, 2};
    wanted.shadow = {.version = 2, .percent = 100};
    registry.put("m", Routes("m", {1, 2}, {}, wanted),
                 {{1, model("1", 0)}, {2, model("2", 0.25F)}});
    const int port = front.start({.host = "127.0.0.1"}, /*threads=*/2);
    channel = grpc::CreateChannel("127.0.0.1:" + std::to_string(port),
                                  grpc::InsecureChannelCredentials());
  }

  std::shared_ptr<ServedModel> model(const std::string& version, float offset) {
    return std::make_shared<ServedModel>(test::echo_package(offset), config,
                                         std::make_shared<ModelMetrics>("m", version), clock, log);
  }

  // The version that answered; the scores are those of `offset`.
  std::string call(float first, int samples, const std::string& version, float offset) {
    const auto stub = predictor::Predictor::NewStub(channel);
    predictor::PredictionRequest message = test::message_of(first, samples);
    message.set_model_name("m");
    message.set_model_version(version);
    grpc::ClientContext of_call;
    predictor::PredictionResponse response;
    const grpc::Status status = stub->Predict(&of_call, message, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    const auto& scores = response.predictions().at("default").data();
    EXPECT_EQ(scores.size(), samples);
    for (int row = 0; row < scores.size(); ++row) {
      EXPECT_EQ(scores[row], first + static_cast<float>(row) + offset);
    }
    return response.model_version();
  }

  void end() {
    admission.shut();
    while (admission.active() > 0) std::this_thread::yield();
    front.stop(std::chrono::seconds(1));
    for (const auto& served : registry.loaded()) served->close();
    EXPECT_EQ(budget.held(), 0);
    front.release();
  }

  Compared result() {
    const ShadowMetrics& metrics = *shadows.of("m", "1", "2");
    return {count_of(metrics, ShadowResult::kCompared), count_of(metrics, ShadowResult::kDropped),
            count_of(metrics, ShadowResult::kFailed), metrics.difference.sum()};
  }

  ServerConfig config;
  SteadyClock clock;
  Log log{LogLevel::kError, true};
  ModelMetrics unresolved{"", ""};
  Admission admission{[] {}};
  ByteBudget budget;
  ShadowList shadows;
  Registry registry{{}};
  PredictContext context{registry, unresolved, admission, budget, clock, log, &shadows};
  http2::Counters counters;
  GrpcFront front{context, {registry, clock, "1.2.3", [] { return false; }}, counters};
  std::shared_ptr<grpc::Channel> channel;
};

TEST_F(ShadowTest, EveryCallIsAnsweredByTheOtherVersionAndComparedOrDropped) {
  constexpr int kClients = 4;
  constexpr int kCalls = 50;
  constexpr int kSamples = 3;
  {
    std::vector<std::jthread> clients;
    for (int client = 0; client < kClients; ++client) {
      clients.emplace_back([&, client] {
        for (int i = 0; i < kCalls; ++i) {
          EXPECT_EQ(call(static_cast<float>(100 * client + i), kSamples, "", 0), "1");
        }
      });
    }
  }
  end();
  const Compared found = result();
  EXPECT_GT(found.compared, 0U);
  EXPECT_EQ(found.compared + found.dropped, std::uint64_t{kClients} * kCalls);
  EXPECT_EQ(found.failed, 0U);
  EXPECT_EQ(found.sum, 0.25 * kSamples * static_cast<double>(found.compared));
}

TEST_F(ShadowTest, ACallThatTheShadowAnswersIsNotComparedWithItself) {
  EXPECT_EQ(call(5, 1, "2", 0.25F), "2");
  end();
  const std::vector<IndexEntry> both = {{.model = "m", .version = "1"},
                                        {.model = "m", .version = "2"}};
  EXPECT_TRUE(shadows.both_in(both).empty());
}

struct FullShadowTest : ShadowTest {
  FullShadowTest() : ShadowTest(100'000) {}
};

TEST_F(FullShadowTest, WithoutRoomTheCallIsAnsweredAndItsShadowDropped) {
  EXPECT_EQ(call(5, 500, "", 0), "1");
  end();
  EXPECT_EQ(result(), (Compared{.dropped = 1}));
}

}  // namespace
}  // namespace tessera
