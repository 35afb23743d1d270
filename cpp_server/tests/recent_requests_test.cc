// The requests that are kept for the warm-up of versions that come.
#include "front/recent_requests.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "echo_message.h"
#include "echo_model.h"

namespace tessera {
namespace {

std::vector<std::byte> bytes_of(std::string_view text) {
  const auto bytes = std::as_bytes(std::span(text));
  return {bytes.begin(), bytes.end()};
}

struct RecentRequestsTest : testing::Test {
  void keep(const std::string& model, const std::vector<std::byte>& message) {
    recent.add(model, message, *protocol);
  }
  std::shared_ptr<ServedModel> served() {
    return std::make_shared<ServedModel>(test::echo_package(), config,
                                         std::make_shared<ModelMetrics>("m", "1"), clock, log);
  }

  const std::unique_ptr<WireProtocol> protocol = make_predict_protocol();
  ServerConfig config;
  SteadyClock clock;
  Log log{LogLevel::kError, true};
  RecentRequests recent;
};

TEST_F(RecentRequestsTest, TheLastOnesOfEachModelAreKept) {
  for (std::size_t i = 0; i < RecentRequests::kKept + 3; ++i) {
    keep("m", bytes_of(std::string(i, 'x')));
  }
  keep("other", bytes_of("y"));
  std::vector<std::size_t> sizes;
  for (const auto& one : recent.of("m")) sizes.push_back(one->message.size());
  std::sort(sizes.begin(), sizes.end());
  ASSERT_EQ(sizes.size(), RecentRequests::kKept);
  EXPECT_EQ(sizes.front(), 3U);
  EXPECT_EQ(recent.of("other").size(), 1U);
  recent.forget("m");
  EXPECT_TRUE(recent.of("m").empty());
  EXPECT_EQ(recent.of("other").size(), 1U);
}

TEST_F(RecentRequestsTest, WhatIsTooLargeIsNotKept) {
  const std::vector<std::byte> large(RecentRequests::kMostBytes);
  keep("m", std::vector<std::byte>(RecentRequests::kMostBytes + 1));
  EXPECT_TRUE(recent.of("m").empty());
  const std::size_t most = RecentRequests::kAllBytes / RecentRequests::kMostBytes;
  std::size_t held = 0;
  const std::size_t models = 2 * most / RecentRequests::kKept;
  for (std::size_t model = 0; model < models; ++model) {
    for (std::size_t i = 0; i < RecentRequests::kKept; ++i) keep(std::to_string(model), large);
    held += recent.of(std::to_string(model)).size();
  }
  EXPECT_EQ(held, most);
  recent.forget("0");
  keep("m", large);  // there is room again
  EXPECT_EQ(recent.of("m").size(), 1U);
}

TEST_F(RecentRequestsTest, OneInSixtyFourIsDueOnEachThread) {
  int due = 0;
  std::thread([&] {
    for (std::uint32_t i = 0; i < 3 * RecentRequests::kOneIn; ++i) due += RecentRequests::due();
  }).join();
  EXPECT_EQ(due, 3);
}

TEST_F(RecentRequestsTest, AVersionIsCalledWithThem) {
  const auto model = served();
  keep("m", bytes_of(test::message_of(0, 3).SerializeAsString()));
  keep("m", bytes_of("no message at all"));
  const WarmUpCounts counts = warm_up_with(recent.of("m"), *model, clock);
  EXPECT_EQ(counts.answered, 1);
  EXPECT_EQ(counts.unfit, 1);
  EXPECT_EQ(counts.failed, 0);
  // A version that has stopped refuses them.
  model->drain();
  model->close();
  const WarmUpCounts stopped = warm_up_with(recent.of("m"), *model, clock);
  EXPECT_EQ(stopped.answered, 0);
  EXPECT_EQ(stopped.failed, 1);
}

}  // namespace
}  // namespace tessera
